"""Repositories of a hub: what is fetched of them, whole and checked, from a hub that this test serves on loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import torch
from attn_core.errors import (
    CheckpointInvalid,
    CheckpointWriteFailed,
    InvalidValue,
    OutOfCapacity,
    Unauthenticated,
    Unavailable,
    UnknownName,
    UserError,
)
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.sources import ModelStore, hub, pull_repository
from attn_models.weights import read_folder
from attn_schema.decoder import DecoderConfig
from huggingface_hub import constants, file_download

COMMIT, LATER = "1" * 40, "2" * 40
REPO = "acme/tiny-llama"
LARGE = (".safetensors", ".gguf", ".bin")


class Hub(ThreadingHTTPServer):
    """A hub of one repository: `files` by name, `revisions` by name, and every request that it got."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.revisions = {"main": COMMIT, COMMIT: COMMIT}
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, int] = {}
        self.lies: dict[str, bytes] = {}
        self.gated = False

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self):
        """The files whose content was asked for."""
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    def sibling(self, name, content):
        oid = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
        said = {"rfilename": name, "size": len(content), "blobId": oid}
        if name.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            said["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
        return said


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.gated:
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="you must accept the terms")
        elif path.startswith(f"/api/models/{REPO}"):
            revision = path.partition("/revision/")[2] or "main"
            if revision not in hub.revisions:
                self.reply(404, X_Error_Code="RevisionNotFound")
                return
            siblings = [hub.sibling(name, content) for name, content in hub.files.items()]
            body = {"id": REPO, "sha": hub.revisions[revision], "siblings": siblings}
            self.reply(200, json.dumps(body).encode(), Content_Type="application/json")
        elif path.startswith(f"/{REPO}/resolve/"):
            self.file(*path.removeprefix(f"/{REPO}/resolve/").split("/", 1))
        else:
            self.reply(404, X_Error_Code="RepoNotFound")

    def file(self, commit, name):
        hub = self.server
        content = hub.lies.get(name, hub.files[name])
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X_Repo_Commit": commit,
            "Accept_Ranges": "bytes",
        }
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[start:]
        if self.command == "GET" and name in hub.cut:
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: hub.cut[name]])
            hub.cut[name] = 0  # and after that nothing more
            self.wfile.flush()
            self.close_connection = True
            return
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if start else 200, body, **headers)


@pytest.fixture
def served(monkeypatch):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 8192)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(**vars(time) | {"sleep": lambda _: None}))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def published(served, tmp_path):
    """A small Llama as its authors publish it, beside what must not be fetched."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "max_seq_len": 32, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    kind = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "mechanism": "mha"}
    model = Decoder(DecoderConfig(**sizes, **kind)).eval()
    folder = save_model(tmp_path / "published", model, layout="llama")
    served.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    served.files |= {
        "pytorch_model.bin": b"\x80\x02pickled",
        "modeling_evil.py": b"raise SystemExit",
        "README.md": b"# tiny",
        "consolidated.safetensors": b"the same again",
        "onnx/model.safetensors": b"another",
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
    }
    return model


def test_a_repository_is_fetched_checked_and_loads(served, published, tmp_path):
    steps = []
    folder = pull_repository(REPO, home=tmp_path / "home", report=steps.append)
    kept = {"config.json", "model.safetensors", "chat_template.jinja", "generation_config.json"}
    assert served.fetched() == kept
    assert {path.name for path in folder.iterdir()} == {*kept, "manifest.json"}
    assert json.loads((folder / "manifest.json").read_text())["source"] == {"repository": REPO, "commit": COMMIT}
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(load_model(folder).model(tokens), published(tokens))
    assert steps[-1].done == steps[-1].total
    assert sorted(path.name for path in folder.parent.iterdir()) == [".acme--tiny-llama.lock", "acme--tiny-llama"]


def test_a_second_pull_fetches_nothing_and_one_of_a_later_commit_what_changed(served, published, tmp_path):
    folder = pull_repository(REPO, home=tmp_path / "home")
    served.requests.clear()
    assert pull_repository(REPO, home=tmp_path / "home") == folder
    assert not served.fetched()
    served.revisions["main"] = served.revisions[LATER] = LATER
    served.files["generation_config.json"] = b'{"temperature": 0.5}'
    pull_repository(REPO, home=tmp_path / "home")
    assert read_folder(folder).generation_config == {"temperature": 0.5}
    assert json.loads((folder / "manifest.json").read_text())["source"]["commit"] == LATER


def test_a_pull_that_was_cut_off_goes_on_where_it_stopped(served, published, tmp_path):
    served.cut = {"model.safetensors": 40_000}
    home = tmp_path / "home"
    with pytest.raises(Unavailable, match=REPO):
        pull_repository(REPO, home=home)
    store = ModelStore(home)
    assert not store.names()
    (partial,) = store.models()
    assert (partial.name, partial.complete) == (REPO, False)
    assert partial.nbytes > 30_000
    served.cut.clear()
    served.requests.clear()
    pull_repository(REPO, home=home)
    ranges = [asked for method, path, asked in served.requests if method == "GET" and path.endswith(".safetensors")]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").split("-")[0]) > 30_000
    assert [model.complete for model in ModelStore(home).models()] == [True]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_what_the_hub_says_is_refused_and_removed(served, published, tmp_path, name):
    honest = served.files[name]
    served.lies = {name: honest[:-9] + b" " * 9}
    with pytest.raises(CheckpointInvalid, match=r"does not have the size and hash that the hub gives"):
        pull_repository(REPO, home=tmp_path / "home")
    assert not ModelStore(tmp_path / "home").names()
    served.lies.clear()
    pull_repository(REPO, home=tmp_path / "home")


def test_shards_are_those_of_the_index_and_no_others(served, published, tmp_path):
    whole = served.files.pop("model.safetensors")
    names = list(json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).keys() - {"__metadata__"})
    served.files["model-00001-of-00001.safetensors"] = whole
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    served.files["model.safetensors.index.json"] = json.dumps(index).encode()
    folder = pull_repository(REPO, home=tmp_path / "home")
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(load_model(folder).model(tokens), published(tokens))
    index["weight_map"][names[0]] = "../../../etc/passwd"
    served.files["model.safetensors.index.json"] = json.dumps(index).encode()
    served.revisions["main"] = served.revisions[LATER] = LATER
    with pytest.raises(CheckpointInvalid, match="is not a weight file of"):
        pull_repository(REPO, home=tmp_path / "home")
    assert ModelStore(tmp_path / "home").names() == [REPO]  # the earlier one is untouched


def test_a_gguf_file_becomes_a_model_and_of_several_one_is_chosen(served, tiny_llama, tmp_path):
    served.files = {"tiny.gguf": tiny_llama.path.read_bytes(), "config.json": b"{}"}
    folder = pull_repository(REPO, home=tmp_path / "home")
    assert set(read_folder(folder).tensors) == set(tiny_llama.weights)
    served.files["tiny-q4.gguf"] = served.files["tiny.gguf"]
    served.revisions["main"] = served.revisions[LATER] = LATER
    with pytest.raises(UserError, match=r"choose with --file: tiny-q4\.gguf \(\d+ MB\), tiny\.gguf"):
        pull_repository(REPO, home=tmp_path / "home")
    with pytest.raises(UnknownName, match="tiny-q8"):
        pull_repository(REPO, file="tiny-q8.gguf", home=tmp_path / "home")
    served.requests.clear()
    pull_repository(REPO, file="tiny-q4.gguf", home=tmp_path / "home")
    assert served.fetched() == {"tiny-q4.gguf"}


def test_all_parts_of_a_gguf_model_are_fetched_and_listed_as_one(served, tiny_llama, parts, tmp_path):
    served.files = {part.name: part.read_bytes() for part in parts}
    folder = pull_repository(REPO, home=tmp_path / "home")
    assert set(read_folder(folder).tensors) == set(tiny_llama.weights)
    served.files["whole.gguf"] = tiny_llama.path.read_bytes()
    served.revisions["main"] = served.revisions[LATER] = LATER
    with pytest.raises(UserError, match=r"choose with --file: tiny-00001-of-00003\.gguf \(\d+ MB\), whole\.gguf"):
        pull_repository(REPO, home=tmp_path / "home")
    served.requests.clear()
    pull_repository(REPO, file=parts[0].name, home=tmp_path / "home")
    assert served.fetched() == {part.name for part in parts}


def test_an_unknown_family_is_refused_before_its_weights_are_fetched(served, published, tmp_path):
    config = json.loads(served.files["config.json"])
    served.files["config.json"] = json.dumps(config | {"model_type": "never_heard_of"}).encode()
    with pytest.raises(UnknownName, match=r"'never_heard_of'.*model-families"):
        pull_repository(REPO, home=tmp_path / "home")
    assert "model.safetensors" not in served.fetched()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"pytorch_model.bin": b"x", "config.json": b"{}"},
            r"only weights in formats that can run.*pytorch_model\.bin",
        ),
        ({"README.md": b"x"}, "no weights"),
        ({}, "no weights"),
        ({"model.safetensors": b"x"}, r"has no config\.json"),
    ],
)
def test_a_repository_without_weights_for_us_says_what_it_has(served, tmp_path, files, said):
    served.files = files
    with pytest.raises(UserError, match=said):
        pull_repository(REPO, home=tmp_path / "home")


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/passwd", "a/../../b.json", "..", "a\\..\\b.json"])
def test_a_hub_whose_file_names_leave_the_folder_is_refused(served, published, tmp_path, name):
    served.files[name] = b"{}"
    with pytest.raises(CheckpointInvalid, match="leaves the folder"):
        pull_repository(REPO, home=tmp_path / "home")
    assert not served.fetched()


@pytest.mark.parametrize(
    "name",
    [
        "../x/y",
        "a/../b",
        "acme/..",
        "acme//b",
        "acme/b/c",
        "/acme/b",
        "acme/b\n",
        "a--b/c",
        "acme/-b",
        "ac me/b",
        "é/b",
    ],
)
def test_a_name_that_is_none_of_a_repository_is_refused_before_anything_is_asked(served, tmp_path, name):
    with pytest.raises(InvalidValue, match="OWNER/REPO"):
        pull_repository(name, home=tmp_path / "home")
    assert not served.requests
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("revision", ["../main", "a..b", "", "-x", "a b", "main\n"])
def test_a_revision_that_is_none_is_refused(served, tmp_path, revision):
    with pytest.raises(InvalidValue, match="revision"):
        pull_repository(REPO, revision, home=tmp_path / "home")


def test_what_the_hub_does_not_have_or_give_is_said(served, published, tmp_path):
    with pytest.raises(UnknownName, match="unknown revision 'v9' of acme/tiny-llama"):
        pull_repository(REPO, "v9", home=tmp_path / "home")
    with pytest.raises(UnknownName, match="unknown repository 'acme/other'"):
        pull_repository("acme/other", home=tmp_path / "home")
    served.gated = True
    with pytest.raises(Unauthenticated, match="HF_TOKEN"):
        pull_repository(REPO, home=tmp_path / "home")


def test_without_a_hub_the_message_says_what_can_be_done(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1.*HF_ENDPOINT.*attn convert"):
        pull_repository(REPO, home=tmp_path / "home")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE"):
        pull_repository(REPO, home=tmp_path / "home")


def test_a_disk_without_room_is_said_before_weights_are_fetched(served, published, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfCapacity, match=r"GB are needed and 0\.00 GB are free.*attn models rm"):
        pull_repository(REPO, home=tmp_path / "home")
    assert not served.fetched()


def test_a_home_that_cannot_be_written_is_said(served, published, tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(CheckpointWriteFailed, match="home"):
        pull_repository(REPO, home=tmp_path / "home")


def test_models_are_listed_with_their_size_family_and_origin_and_removed_by_name(served, published, tmp_path):
    home = tmp_path / "home"
    pull_repository(REPO, home=home)
    save_model(home / "models" / "mine", published)
    store = ModelStore(home)
    fetched, mine = store.models()
    assert (fetched.name, fetched.family, fetched.origin) == (REPO, "llama", f"{REPO} at {COMMIT[:12]}")
    assert fetched.nbytes > len(served.files["model.safetensors"])
    assert (mine.name, mine.family, mine.origin, mine.complete) == ("mine", "attn_decoder", "", True)
    assert store.find(REPO) == fetched.path
    assert store.remove(REPO) == fetched.nbytes
    assert [path.name for path in (home / "models").iterdir()] == ["mine"]
    with pytest.raises(UserError, match=f"attn pull {REPO}"):
        store.find(REPO)


@pytest.mark.parametrize("name", ["../secret", "/", "", ".", "..", "nobody", "mine/..", "../models/mine"])
def test_nothing_but_a_model_of_the_store_is_ever_removed(published, tmp_path, name):
    home = tmp_path / "home"
    save_model(home / "models" / "mine", published)
    (home / "secret").mkdir()
    with pytest.raises(UnknownName, match="model on this machine"):
        ModelStore(home).remove(name)
    assert (home / "secret").is_dir()
    assert ModelStore(home).names() == ["mine"]


def test_removing_a_linked_model_leaves_what_it_links_to(published, tmp_path):
    save_model(tmp_path / "elsewhere", published)
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "linked").symlink_to(tmp_path / "elsewhere")
    ModelStore(tmp_path / "home").remove("linked")
    assert not ModelStore(tmp_path / "home").names()
    assert (tmp_path / "elsewhere" / "config.json").is_file()


def test_a_damaged_model_is_listed_as_such(published, tmp_path):
    folder = save_model(tmp_path / "home" / "models" / "mine", published)
    (folder / "model.safetensors").unlink()
    assert [model.complete for model in ModelStore(tmp_path / "home").models()] == [False]
    (folder / "config.json").write_text("{")
    (found,) = ModelStore(tmp_path / "home").models()
    assert "not JSON" in found.origin


def test_a_repository_is_checked_without_its_weights(served, published, tmp_path):
    found = ModelStore(tmp_path / "home").check(REPO)
    assert found.refused is None
    assert (found.parameters, found.max_seq_len) == (sum(p.numel() for p in published.parameters()), 32)
    asked = [(given, path) for method, path, given in served.requests if method == "GET"]
    ranges = [given for given, path in asked if path.endswith("model.safetensors")]
    assert ranges
    assert all(given is not None and given != "bytes=0-" for given in ranges)
    config = json.loads(served.files["config.json"])
    served.files["config.json"] = json.dumps(config | {"intermediate_size": config["intermediate_size"] - 1}).encode()
    assert "its model needs" in ModelStore(tmp_path / "home").check(REPO).refused
    served.gated = True
    with pytest.raises(Unauthenticated):
        ModelStore(tmp_path / "home").check(REPO)
