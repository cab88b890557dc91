"""A checkpoint is whole or not there."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
import torch
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed
from attn_train.checkpoint import CheckpointFolder, Progress, read_checkpoint
from attn_train.records import StopFlag
from attn_train.trainer import Trainer

PARTS = {"weights": {"a": torch.arange(6.0).view(2, 3)}, "random": {"cpu": torch.tensor([1, 2], dtype=torch.uint8)}}


def write(folder, step, parts=PARTS):
    return folder.write(Progress(step=step, elapsed_seconds=1.5), parts)


def test_what_is_read_is_what_was_written(tmp_path):
    checkpoint = write(CheckpointFolder(tmp_path), 12)
    progress, parts = read_checkpoint(checkpoint.path)
    assert progress == Progress(step=12, elapsed_seconds=1.5)
    assert parts.keys() == PARTS.keys()
    assert torch.equal(parts["weights"]["a"], PARTS["weights"]["a"])
    assert checkpoint.size == sum(file.stat().st_size for file in checkpoint.path.iterdir())


def test_the_newest_is_that_of_the_highest_step_and_only_the_newest_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    for step in (30, 4, 100):
        write(folder, step)
    assert folder.newest().step == 100
    folder.prune(keep=2)
    assert [checkpoint.step for checkpoint in folder.complete()] == [30, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000030", "step-000000100"]


def test_unfinished_and_foreign_folders_are_no_checkpoints_and_are_swept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    (tmp_path / ".step-000000002.partial-host-1-ab").mkdir()
    (tmp_path / "step-3-copy").mkdir()
    assert [checkpoint.step for checkpoint in folder.complete()] == [1]
    folder.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-3-copy"]


@pytest.mark.parametrize("name", ["weights.safetensors", "random.safetensors", "progress.json"])
def test_a_changed_or_missing_file_is_refused_with_its_path(tmp_path, name):
    checkpoint = write(CheckpointFolder(tmp_path), 1)
    content = bytearray((checkpoint.path / name).read_bytes())
    content[-2] ^= 1
    (checkpoint.path / name).write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=name):
        read_checkpoint(checkpoint.path)
    (checkpoint.path / name).unlink()
    with pytest.raises(CheckpointInvalid, match=name):
        read_checkpoint(checkpoint.path)


def test_a_checkpoint_without_its_manifest_is_refused(tmp_path):
    checkpoint = write(CheckpointFolder(tmp_path), 1)
    (checkpoint.path / "manifest.json").unlink()
    with pytest.raises(CheckpointInvalid, match="manifest"):
        read_checkpoint(checkpoint.path)


@contextmanager
def small_files():
    """The operating system refuses files over 4 kB, as a full disk refuses everything.

    No fixture: pytest reports before it ends one, and its report may be such a file itself.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_leaves_the_older_checkpoint_and_no_litter(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 1)
    with small_files(), pytest.raises(CheckpointWriteFailed):
        write(folder, 2, {"weights": {"a": torch.zeros(10_000)}})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert torch.equal(read_checkpoint(folder.newest().path)[1]["weights"]["a"], PARTS["weights"]["a"])


def test_training_goes_on_when_a_checkpoint_cannot_be_written_but_does_not_end_as_if_it_had_been(
    bigram, text, config, record, tmp_path
):
    seen = record()
    with small_files(), pytest.raises(CheckpointWriteFailed):
        Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, StopFlag())
    assert max(seen.losses) == 30
    assert [line.split(":")[0] for line in seen.lines] == ["CHECKPOINT_WRITE_FAILED"] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    program = textwrap.dedent(
        """
        import sys, torch
        from pathlib import Path
        from attn_train.checkpoint import CheckpointFolder, Progress
        folder = CheckpointFolder(Path(sys.argv[1]))
        for step in range(1, 1_000_000):
            folder.write(Progress(step=step, elapsed_seconds=0), {"weights": {"a": torch.full((20_000,), float(step))}})
            folder.prune(2)
            print(step, flush=True)
        """
    )
    folder = CheckpointFolder(tmp_path)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        for _ in range(20):
            step = int(writer.stdout.readline())
        writer.kill()
    for checkpoint in folder.complete():
        progress, parts = read_checkpoint(checkpoint.path)
        assert progress.step == checkpoint.step
        assert parts["weights"]["a"].eq(checkpoint.step).all()
    assert folder.newest().step >= step
    folder.sweep()
    assert not list(tmp_path.glob(".*"))
