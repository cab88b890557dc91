"""A run that was interrupted goes on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import CheckpointInvalid
from attn_schema.optimization import OPTIMIZER_FIELDS, OptimizerConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.optimizer import optimizer_of, restore_optimizer_state
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer
from torch import nn


def whole_run(bigram, text, config, record):
    seen = record()
    trainer = Trainer(bigram(), text, config)
    assert trainer.run(seen, StopFlag()) is None
    return seen, trainer


def test_a_resumed_run_has_bit_equal_losses_and_weights(bigram, text, config, record, tmp_path):
    undisturbed, reference = whole_run(bigram, text, config, record)
    folder = CheckpointFolder(tmp_path)
    for stop_at in (7, 8, 19):
        flag, seen = StopFlag(), record()
        seen.on_metrics = lambda step, flag=flag, at=stop_at: flag.set(Stop.SAVE) if step == at else None
        trainer = Trainer(bigram(), text, config, checkpoints=folder)
        torch.rand(5)  # whatever else draws from the generator of the process must not matter
        trainer.resume()
        assert trainer.run(seen, flag) is Stop.SAVE
        assert seen.losses == {step: undisturbed.losses[step] for step in seen.losses}
    last, seen = Trainer(bigram(), text, config, checkpoints=folder), record()
    assert last.resume()
    assert last.step == 19
    assert last.run(seen, StopFlag()) is None
    assert seen.losses == {step: undisturbed.losses[step] for step in range(20, 31)}
    assert seen.validation == {30: undisturbed.validation[30]}
    for name, tensor in reference.model.state_dict().items():
        assert torch.equal(tensor, last.model.state_dict()[name]), name


class Sparing(nn.Module):
    """A model with a weight that never has a gradient, and one that has its first after 12 steps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.never, self.late = nn.Linear(4, 4), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens):
        if self.training:
            self.calls += 1
        rows = self.inner.embedding(tokens)
        return self.inner.output(self.late(rows) if self.calls.item() > 12 else rows)


@pytest.mark.parametrize("optim", OPTIMIZER_FIELDS)
@pytest.mark.parametrize("stop_at", [7, 14])
def test_weights_that_have_had_no_gradient_yet_are_resumed_bit_for_bit(
    bigram, text, config, record, changed, tmp_path, optim, stop_at
):
    config = changed(config, optimizer=OptimizerConfig(steps=18, batch_size=4, learning_rate=1e-2, optim=optim))
    made = lambda: Sparing(bigram())  # noqa: E731
    undisturbed, reference = whole_run(made, text, config, record)
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == stop_at else None
    torch.manual_seed(5)
    Trainer(made(), text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, flag)
    last, seen = Trainer(made(), text, config, checkpoints=CheckpointFolder(tmp_path)), record()
    assert last.resume()
    assert last.run(seen, StopFlag()) is None
    assert seen.losses == {step: undisturbed.losses[step] for step in range(stop_at + 1, 19)}
    for name, tensor in reference.model.state_dict().items():
        assert torch.equal(tensor, last.model.state_dict()[name]), name


def test_a_part_of_a_weights_state_is_refused(bigram, config):
    model = bigram()
    optimizer = optimizer_of(model, config.optimizer)
    held = {"exp_avg:hidden.weight": torch.zeros(16, 16)}
    with pytest.raises(CheckpointInvalid):
        restore_optimizer_state(model, optimizer, held, config.optimizer)


def test_the_moments_of_the_optimiser_matter_to_the_losses_so_that_the_law_above_can_fail(
    bigram, text, config, record, tmp_path
):
    undisturbed, _ = whole_run(bigram, text, config, record)
    folder = CheckpointFolder(tmp_path)
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == 10 else None
    Trainer(bigram(), text, config, checkpoints=folder).run(seen, flag)
    forgetful, seen = Trainer(bigram(), text, config, checkpoints=folder), record()
    forgetful.resume()
    for state in forgetful._optimizer.state.values():
        state["exp_avg"].zero_()
    forgetful.run(seen, StopFlag())
    assert seen.losses[12] != undisturbed.losses[12]


def test_evaluation_and_checkpoints_do_not_change_the_training(bigram, text, config, record, changed, tmp_path):
    plain, _ = whole_run(bigram, text, changed(config, evaluation__eval_steps=1000), record)
    often = changed(config, evaluation__eval_steps=1, checkpoint__save_steps=1)
    seen = record()
    Trainer(bigram(), text, often, checkpoints=CheckpointFolder(tmp_path)).run(seen, StopFlag())
    assert seen.losses == plain.losses
    assert len(seen.validation) == 30


def test_another_seed_draws_other_batches(bigram, text, config, record, changed):
    first, _ = whole_run(bigram, text, config, record)
    second, _ = whole_run(bigram, text, changed(config, seed=12), record)
    assert first.losses[1] != second.losses[1]


def test_a_stop_is_seen_before_the_next_step(bigram, text, config, record, tmp_path):
    for how, saved in ((Stop.SAVE, [7]), (Stop.DISCARD, [])):
        flag, seen = StopFlag(), record()
        seen.on_metrics = lambda step, flag=flag, how=how: flag.set(how) if step == 7 else None
        trainer = Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path / how))
        assert trainer.run(seen, flag) is how
        assert max(seen.losses) == 7
        assert seen.checkpoints == saved


def test_discarding_overrules_saving_and_not_the_other_way():
    flag = StopFlag()
    assert flag.get() is None
    flag.set(Stop.SAVE)
    flag.set(Stop.DISCARD)
    flag.set(Stop.SAVE)
    assert flag.get() is Stop.DISCARD


def test_training_lowers_the_loss_on_text_it_has_not_seen(bigram, text, config, changed, record):
    seen, trainer = whole_run(bigram, text, changed(config, optimizer__steps=200), record)
    assert seen.validation[200] < seen.losses[1] - 1
    assert trainer.validation_loss(2) == seen.validation[200]


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_gradients_are_those_of_one_large_batch(bigram, text, config, changed, record, parts):
    """In exact arithmetic; here the losses and weights of 20 steps agree to what float32 rounds."""
    runs = []
    for batch, count in ((8, 1), (8 // parts, parts)):
        model, seen = bigram().eval(), record()
        model.dropout.p = 0.0
        fields = {"optimizer__batch_size": batch, "optimizer__gradient_accumulation_steps": count}
        Trainer(model, text, changed(config, **fields, optimizer__steps=20)).run(seen, StopFlag())
        runs.append((list(seen.losses.values()), model))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    for one, other in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def truncated(folder):
    weights = folder / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def flipped(folder):
    weights = folder / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def missing(folder):
    (folder / "optimizer.safetensors").unlink()


def emptied(folder):
    (folder / "manifest.json").write_text("")


def listing_nothing(folder):
    (folder / "manifest.json").write_text('{"format": 1, "files": {}}')


@pytest.mark.parametrize("damage", [truncated, flipped, missing, emptied, listing_nothing])
def test_a_damaged_newest_checkpoint_is_reported_and_the_run_goes_on_from_the_one_before(
    damage, bigram, text, config, record, changed, tmp_path
):
    whole = record()
    Trainer(bigram(), text, config).run(whole, StopFlag())
    folder = CheckpointFolder(tmp_path)
    Trainer(bigram(), text, changed(config, optimizer__steps=30), checkpoints=folder).run(record(), StopFlag())
    assert [found.step for found in folder.complete()] == [20, 30]
    damage(folder.newest().path)
    again, seen = Trainer(bigram(), text, config, checkpoints=folder), record()
    assert again.resume(seen)
    assert again.step == 20
    assert len(seen.lines) == 1
    assert "the checkpoint of step 30 is damaged" in seen.lines[0]
    again.run(seen, StopFlag())
    assert seen.losses == {step: loss for step, loss in whole.losses.items() if step > 20}
    assert folder.newest().step == 30, "a whole checkpoint has taken the place of the damaged one"
    assert Trainer(bigram(), text, config, checkpoints=folder).resume()


def test_where_all_checkpoints_are_damaged_the_run_begins_anew(bigram, text, config, record, tmp_path):
    folder = CheckpointFolder(tmp_path)
    Trainer(bigram(), text, config, checkpoints=folder).run(record(), StopFlag())
    for found in folder.complete():
        flipped(found.path)
    again, seen = Trainer(bigram(), text, config, checkpoints=folder), record()
    assert not again.resume(seen)
    assert (again.step, len(seen.lines)) == (0, 2)
