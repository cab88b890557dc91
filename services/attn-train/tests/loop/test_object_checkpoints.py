"""Checkpoints in an object store are those of a folder: whole or not there, and read by any machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed, Unavailable
from attn_train import object_checkpoints
from attn_train.checkpoint import CheckpointFolder, Progress, read_progress
from attn_train.object_checkpoints import ObjectCheckpoints, checkpoints_of
from attn_train.records import StopFlag
from attn_train.sharded_checkpoint import read_whole
from attn_train.trainer import Trainer
from s3_server import bucket_server

PARTS = ("weights", "optimizer", "random")


@pytest.fixture
def bucket(monkeypatch):
    with bucket_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A store that fails is told at once."""
    monkeypatch.setattr(object_checkpoints, "PATIENCE", {"max_retries": 0})


def state(step):
    return {part: {"a": torch.full((300,), float(step)), "b": torch.tensor(step)} for part in PARTS}


def written(checkpoints, *steps):
    for step in steps:
        checkpoints.write(Progress(step=step, elapsed_seconds=1.5), state(step))
    return checkpoints


def require_step(checkpoints, step):
    with checkpoints.opened(step) as folder:
        assert read_progress(folder) == Progress(step=step, elapsed_seconds=1.5)
        for part, tensors in read_whole(folder).items():
            assert all(torch.equal(tensors[name], value) for name, value in state(step)[part].items())


def test_what_one_machine_writes_another_reads(tmp_path, bucket):
    saved = written(ObjectCheckpoints("s3://b/jobs/one", tmp_path / "here"), 5, 10).newest()
    there = ObjectCheckpoints("s3://b/jobs/one", tmp_path / "there")
    told = []
    found = there.newest_whole(lambda *damage: told.append(damage))
    assert (found, told) == (saved, [])
    assert (found.step, found.where) == (10, "s3://b/jobs/one/step-000000010")
    assert found.size == sum(len(data) for name, data in bucket.objects.items() if "step-000000010-" in name)
    require_step(there, 10)
    require_step(there, 5)
    assert ObjectCheckpoints("s3://b/jobs/other", tmp_path / "x").newest() is None


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "manifest", "elsewhere"])
def test_of_a_damaged_one_that_is_told_the_one_before_is_taken(tmp_path, bucket, damage):
    checkpoints = written(ObjectCheckpoints("s3://b/j", tmp_path / "here"), 5, 10)
    (name,) = [name for name in bucket.objects if name.startswith("j/step-000000010-") and "weights" in name]
    manifest = "j/step-000000010.json"
    if damage == "changed":
        bucket.objects[name] = bucket.objects[name][:-1] + b"?"
    elif damage == "cut":
        bucket.objects[name] = bucket.objects[name][:-1]
    elif damage == "missing":
        del bucket.objects[name]
    elif damage == "manifest":
        bucket.objects[manifest] = bucket.objects[manifest][:-9]
    else:
        bucket.objects[manifest] = bucket.objects[manifest].replace(b"weights.safetensors", b"../../etc/passwd---")
    told = []
    found = checkpoints.newest_whole(lambda saved, error: told.append((saved.step, error)))
    assert found.step == 5
    ((step, error),) = told
    assert step == 10
    assert isinstance(error, CheckpointInvalid)
    assert checkpoints.newest().step == 5
    checkpoints.sweep()
    assert not [name for name in bucket.objects if "step-000000010" in name]
    require_step(checkpoints, 5)


def test_old_ones_and_what_was_left_behind_are_removed(tmp_path, bucket):
    checkpoints = written(ObjectCheckpoints("s3://b/j", tmp_path / "here"), 1, 2, 3)
    bucket.objects["j/step-000000004-ab/weights.safetensors"] = b"of a writer that was killed"
    bucket.objects["other/step-000000001.json"] = b"of another job"
    checkpoints.prune(2)
    assert {name.partition("-")[2][:9] for name in bucket.objects if name.startswith("j/")} == {
        "000000002",
        "000000003",
    }
    require_step(checkpoints, 2)
    checkpoints.remove()
    assert list(bucket.objects) == ["other/step-000000001.json"]


def test_a_writer_that_dies_at_any_request_leaves_the_one_before(tmp_path, bucket, monkeypatch):
    checkpoints = written(ObjectCheckpoints("s3://b/j", tmp_path / "here"), 1)
    real, left, ended = ObjectCheckpoints._call, 0, False

    def call(self, function, *arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise Unavailable("the machine went away")
        return real(self, function, *arguments)

    for requests in range(20):
        left = requests
        with monkeypatch.context() as patched:
            patched.setattr(ObjectCheckpoints, "_call", call)
            try:
                checkpoints.write(Progress(step=2, elapsed_seconds=1.5), state(2))
                ended = True
            except CheckpointWriteFailed:
                assert not ended
        found = ObjectCheckpoints("s3://b/j", tmp_path / "there").newest_whole(lambda *_: pytest.fail("damaged"))
        assert found.step == (2 if ended else 1)
        if ended:
            break
    assert ended
    assert requests >= len(PARTS) + 1
    checkpoints.sweep()
    require_step(checkpoints, 2)
    assert len({name.partition("/")[2].partition("/")[0] for name in bucket.objects}) == 4


def test_a_store_that_cannot_be_reached_is_said_and_changes_nothing(tmp_path, bucket):
    checkpoints = written(ObjectCheckpoints("s3://b/j", tmp_path / "here"), 1, 2, 3)
    before = dict(bucket.objects)
    bucket.answers = False
    with pytest.raises(CheckpointWriteFailed, match="artefact store s3://b/j"):
        checkpoints.write(Progress(step=4, elapsed_seconds=0.0), state(4))
    for read in (checkpoints.newest, lambda: checkpoints.newest_whole(lambda *_: None), checkpoints.remove):
        with pytest.raises(Unavailable, match="artefact store s3://b/j"):
            read()
    checkpoints.prune(1)
    checkpoints.sweep()
    assert bucket.objects == before
    bucket.answers = True
    assert written(checkpoints, 4).newest().step == 4


def test_large_files_go_in_parts(tmp_path, bucket):
    checkpoints = ObjectCheckpoints("s3://b/j", tmp_path / "here")
    large = {"weights": {"a": torch.arange(3_000_000.0)}, "random": {"b": torch.zeros(1)}}
    checkpoints.write(Progress(step=1, elapsed_seconds=0.0), large)
    assert not bucket.parts
    with checkpoints.opened(1) as folder:
        assert torch.equal(read_whole(folder)["weights"]["a"], large["weights"]["a"])


def test_the_place_follows_from_the_url_of_the_artefacts(tmp_path):
    home = checkpoints_of("j", tmp_path, None)
    shared = checkpoints_of("j", tmp_path, "file:///mnt/shared")
    stored = checkpoints_of("j", tmp_path, "s3://bucket/prefix/")
    assert isinstance(home, CheckpointFolder)
    assert home.path == tmp_path / "jobs" / "j" / "checkpoints"
    assert isinstance(shared, CheckpointFolder)
    assert shared.path == Path("/mnt/shared/checkpoints/j")
    assert isinstance(stored, ObjectCheckpoints)
    assert stored.url == "s3://bucket/prefix/checkpoints/j"


def test_a_run_goes_on_from_a_store_bit_for_bit(tmp_path, bucket, bigram, text, config, changed, record):
    alone, first, second = record(), record(), record()
    Trainer(bigram(), text, config).run(alone, StopFlag())
    short = changed(config, optimizer__steps=30)
    stop = StopFlag()
    first.on_metrics = lambda step: stop.set("save") if step == 17 else None
    here = Trainer(bigram(), text, short, checkpoints=ObjectCheckpoints("s3://b/j", tmp_path / "here"))
    here.run(first, stop)
    there = Trainer(bigram(), text, short, checkpoints=ObjectCheckpoints("s3://b/j", tmp_path / "there"))
    assert there.resume(second)
    there.run(second, StopFlag())
    assert first.losses | second.losses == alone.losses
    assert min(second.losses) > 1
    assert len([name for name in bucket.objects if name.endswith(".json") and "/step-" in name]) == 4
