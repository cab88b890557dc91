"""With `load_best_model_at_end` the exported weights are those of the lowest validation loss, and with
`early_stopping_patience` a run stops once it no longer falls."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Incompatible
from attn_train.checkpoint import CheckpointFolder
from attn_train.records import Stop, StopFlag
from attn_train.tasks.language_modeling import tokenize
from attn_train.trainer import Trainer

LOSSES = [3.0, 2.0, 2.5, 2.25, 2.0, 2.125]
"""Validation losses by measurement: the second is the first of the lowest ones."""


@pytest.fixture
def wanted(config, changed):
    return changed(config, evaluation__eval_steps=5, evaluation__load_best_model_at_end=True, checkpoint__save_steps=5)


@pytest.fixture
def falling(monkeypatch):
    """Validation losses of `LOSSES`, and the weights that were measured."""
    weights = []

    def losses(task, model, batches, on_batch):
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        return {"": LOSSES[len(weights) - 1]}

    monkeypatch.setattr("attn_train.trainer.validation_losses", losses)
    return weights


def exported(trainer):
    return [parameter.detach() for parameter in trainer.whole_model().parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("averaged", [False, True])
def test_the_exported_weights_are_those_of_the_lowest_loss(bigram, text, wanted, changed, falling, record, averaged):
    given = changed(wanted, optimizer__ema_decay=0.5) if averaged else wanted
    trainer, seen = Trainer(bigram(), text, given), record()
    trainer.run(seen, StopFlag())
    assert len(falling) == given.optimizer.steps // 5 == len(LOSSES)
    found = exported(trainer)
    assert same(found, falling[1])
    assert not same(found, falling[-1])


@pytest.mark.parametrize("stopped", [10, 15, 20])
def test_a_resumed_run_knows_the_best_weights(bigram, text, wanted, falling, record, tmp_path, stopped):
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: step == stopped and flag.set(Stop.SAVE)
    checkpoints = CheckpointFolder(tmp_path)
    Trainer(bigram(), text, wanted, checkpoints=checkpoints).run(seen, flag)
    trainer = Trainer(bigram(), text, wanted, checkpoints=checkpoints)
    assert trainer.resume()
    trainer.run(record(), StopFlag())
    assert same(exported(trainer), falling[1])


@pytest.mark.parametrize("keeps", [False, True])
def test_a_run_stops_when_the_loss_has_not_fallen_for_long_and_stays_so(
    bigram, text, wanted, changed, falling, record, tmp_path, keeps
):
    patient = changed(wanted, evaluation__early_stopping_patience=2, evaluation__load_best_model_at_end=keeps)
    checkpoints = CheckpointFolder(tmp_path)
    trainer = Trainer(bigram(), text, patient, checkpoints=checkpoints)
    assert trainer.run(record(), StopFlag()) is None
    assert (trainer.step, len(falling)) == (20, 4)
    again = Trainer(bigram(), text, patient, checkpoints=checkpoints)
    again.resume()
    again.run(record(), StopFlag())
    assert (again.step, len(falling)) == (20, 4)
    assert same(exported(again), falling[1 if keeps else 3])


def test_without_validation_data_it_is_refused_before_the_first_step(bigram, words, wanted, record):
    trainer = Trainer(bigram(), tokenize(words, validation=0.0), wanted)
    with pytest.raises(Incompatible, match="validation data"):
        trainer.run(record(), StopFlag())
    assert trainer.step == 0
