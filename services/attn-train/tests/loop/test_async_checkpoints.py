"""Checkpoints are written beside the next steps, one at a time, and hold the state of their step."""

from __future__ import annotations

import threading

import pytest
import torch
from attn_core.errors import CheckpointWriteFailed
from attn_train.async_checkpoint import AsyncCheckpoints
from attn_train.checkpoint import CheckpointFolder, Progress, read_checkpoint
from attn_train.records import Stop, StopFlag
from attn_train.sharded_checkpoint import Block, Pieces
from attn_train.trainer import Trainer


class Gated(CheckpointFolder):
    """A folder on a disk that writes nothing until it may."""

    def __init__(self, path):
        super().__init__(path)
        self.may = threading.Event()

    def write(self, progress, parts, group=None):
        self.may.wait()
        return super().write(progress, parts, group)


def test_training_goes_on_while_a_checkpoint_is_written_which_holds_its_own_step(
    bigram, text, config, record, tmp_path
):
    undisturbed = record()
    Trainer(bigram(), text, config).run(undisturbed, StopFlag())
    folder, flag, seen = Gated(tmp_path), StopFlag(), record()

    def on_metrics(step):
        if step == 17:
            assert folder.complete() == []
            folder.may.set()
            flag.set(Stop.DISCARD)

    seen.on_metrics = on_metrics
    trainer = Trainer(bigram(), text, config, checkpoints=folder)
    assert trainer.run(seen, flag) is Stop.DISCARD
    assert seen.checkpoints == [10], "it is whole before the run returns"
    again, after = Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path)), record()
    assert again.resume()
    assert again.step == 10
    again.run(after, StopFlag())
    assert after.losses == {step: undisturbed.losses[step] for step in range(11, 31)}


def test_one_checkpoint_is_written_at_a_time_and_waits_are_counted(bigram, text, config, record, tmp_path):
    folder, seen = Gated(tmp_path), record()
    trainer = Trainer(bigram(), text, config, checkpoints=folder)
    running = threading.Thread(target=trainer.run, args=(seen, StopFlag()), daemon=True)
    running.start()
    while trainer.checkpoint_stops.waits == 0 and running.is_alive():
        running.join(0.01)
    assert max(seen.losses) == 20
    folder.may.set()
    running.join()
    assert seen.checkpoints == [10, 20, 30]
    assert trainer.checkpoint_stops.waits >= 1
    assert len(trainer.checkpoint_stops.seconds) == 3


def test_what_goes_wrong_in_the_thread_and_is_not_of_the_disk_ends_the_run(bigram, text, config, record, tmp_path):
    class Broken(CheckpointFolder):
        def write(self, progress, parts, group=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trainer(bigram(), text, config, checkpoints=Broken(tmp_path)).run(record(), StopFlag())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(2.5),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ],
    ids=["matrix", "transposed", "scalar", "bfloat16", "bool"],
)
def test_a_checkpoint_holds_what_was_there_before_the_next_update(tmp_path, tensor):
    before, given = tensor.clone(), tensor.clone(memory_format=torch.preserve_format)
    writer = AsyncCheckpoints(CheckpointFolder(tmp_path), 1, None, leads=True)
    whole = Pieces(before.shape, (Block((0,) * before.dim(), given),))
    writer.begin(Progress(step=1, elapsed_seconds=0.0), {"weights": {"a": given, "b": whole}})
    writer.wait_for_copy()
    given.zero_()
    written = writer.finished()
    assert writer.finished() is None, "once"
    _, parts = read_checkpoint(written.saved.path)
    assert all(torch.equal(parts["weights"][name], before) for name in "ab")


def test_a_write_that_fails_is_told_once_and_the_next_one_is_tried(tmp_path):
    place = tmp_path / "checkpoints"
    place.write_text("a file where the folder should be")
    writer = AsyncCheckpoints(CheckpointFolder(place), 1, None, leads=True)
    for step in (1, 2):
        writer.begin(Progress(step=step, elapsed_seconds=0.0), {"weights": {"a": torch.zeros(2)}})
        written = writer.finished()
        assert written.saved is None
        assert isinstance(written.error, CheckpointWriteFailed)
    place.unlink()
    writer.begin(Progress(step=3, elapsed_seconds=0.0), {"weights": {"a": torch.zeros(2)}})
    assert writer.finished().saved.step == 3
