"""What belongs to one tenant does not exist for another, in whatever field and however its path is spelled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceStub
from attn_gateway.records import Database, ModelRecord, ModelRecords, database_url
from attn_schema.schema import fields_of, is_noun
from attn_schema.training import TrainingConfig
from google.rpc import error_details_pb2
from grpc_status import rpc_status

FIELDS = {
    f"{part.name}.{info.name}": info.extra["names"]
    for part in fields_of(TrainingConfig)
    if is_noun(part.kind)
    for info in fields_of(part.kind)
    if "names" in info.extra
}
DATA = {"dataset", "prepared"}


def request(config: pb.TrainingConfig, field: str, text: str) -> pb.SubmitTrainingJobRequest:
    asked = pb.SubmitTrainingJobRequest(config=config, validate_only=True)
    part, name = field.split(".")
    if name == "prepared":
        asked.config.data.dataset = ""
    setattr(getattr(asked.config, part), name, text)
    return asked


@pytest.fixture
def stored(home: Path, tmp_path: Path, words: str) -> Path:
    """Ann's model, job and data in the home, and an artefact store."""
    for folder in ("models/anns", "models/x--y", "jobs/anns", "data/ann/anns", "data/bob", "artifacts/folders/anns"):
        (home / folder).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "data.json", "train.txt"):
            (home / folder / name).write_text(words)
    (tmp_path / "store" / "anns").mkdir(parents=True)
    with Database(database_url(home)) as database:
        for name in ("anns", "x--y"):
            ModelRecords(database).record(ModelRecord(name, "ann"))
    return home


def spellings(home: Path, folder: Path, name: str) -> dict[str, str]:
    """Ways to write the path of `folder / name`; links to it lie in the folder of bob, whether or not it exists."""
    bob, target = home / "data" / "bob", folder / name
    link, within = (bob / f"{word}-{folder.name}-{name}" for word in ("link", "within"))
    link.symlink_to(target)
    within.mkdir()
    (within / "config.json").symlink_to(target / "config.json")
    found = {
        "absolute": str(target),
        "dots": str(bob / ".." / ".." / folder.relative_to(home) / name),
        "slashes": f"//{target}/./",
        "link": str(link),
        "link as a folder": f"{link}/",
        "through a link": str(link / ".." / name),
        "links within": str(within),
        "relative": os.path.relpath(target),
        "URL": f"file://{target}",
    }
    other = folder.parent / folder.name.upper() / name.upper()
    if (folder.parent / folder.name.upper()).exists():
        found["case"] = str(other)
    return found


async def error(stub: TrainingServiceStub, asked: pb.SubmitTrainingJobRequest, caller: dict[str, Any]) -> str:
    """The code and message of the refusal; empty if there is none."""
    try:
        await stub.SubmitTrainingJob(asked, **caller)
    except grpc.aio.AioRpcError as refusal:
        return f"{refusal.code().name} {refusal.details()}"
    return ""


@pytest.mark.parametrize("wide", [False, True], ids=["data of the home", "a root around the home"])
@pytest.mark.parametrize("field", FIELDS)
async def test_no_spelling_shows_a_tenant_what_belongs_to_another(
    stored, shared, by, wire_config, tmp_path, monkeypatch, field, wide
):
    monkeypatch.setenv("ATTN_ARTIFACTS", f"file://{tmp_path}/store")
    settings = {"data_roots": (tmp_path,)} if wide else {}
    async with shared(**settings) as stub:

        async def refusal(text: str) -> str:
            said = await error(stub, request(wire_config, field, text), by("two"))
            assert said.startswith(("INVALID_ARGUMENT", "NOT_FOUND")), text
            return said

        for place in ("data/ann", "models", "jobs"):
            theirs, nobodys = (spellings(stored, stored / place, name) for name in ("anns", "none"))
            for spelling, text in theirs.items():
                assert (await refusal(text)).replace("anns", "none") == await refusal(nobodys[spelling]), spelling
        for name in () if FIELDS[field] in DATA else ("anns", "x/y"):
            assert (await refusal(name)).replace(name, "none") == await refusal("none")
        for folder in (stored, stored / "data", stored / "models", tmp_path, tmp_path / "store" / "anns"):
            assert "a path below" in await refusal(str(folder))
        # What is refused for bob because it is ann's is not refused for ann: she gets to another error, or to none.
        own = request(wire_config, field, str(stored / ("data/ann/anns" if FIELDS[field] in DATA else "models/anns")))
        assert "a path below" in await error(stub, own, by("two"))
        assert "a path below" not in await error(stub, own, by("one"))


@pytest.mark.parametrize("field", FIELDS)
async def test_a_path_that_no_file_has_or_that_cannot_be_read_is_refused_with_its_field(
    server, wire_config, tmp_path, field
):
    (tmp_path / "closed" / "within").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    texts = ["a\0b", "/a\0b", "x" * 5000, "/x" * 2500, "/" + "x" * 256, str(tmp_path / "closed"), "/no/such/file"]
    if os.geteuid() != 0:
        texts.append(str(tmp_path / "closed" / "within"))
    async with server() as stub:
        for text in texts:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.SubmitTrainingJob(request(wire_config, field, text))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, text
            bad = error_details_pb2.BadRequest()
            assert any(detail.Unpack(bad) for detail in rpc_status.from_call(caught.value).details), text
            assert bad.field_violations[0].field == f"config.{field}", text
