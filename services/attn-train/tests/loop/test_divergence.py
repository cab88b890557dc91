"""A run that cannot work says so."""

from __future__ import annotations

import math

import pytest
import torch
from attn_train.checkpoint import CheckpointFolder
from attn_train.divergence import TrainingDiverged
from attn_train.records import StopFlag
from attn_train.trainer import Trainer


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(bigram, text, config, record, tmp_path):
    model = bigram()
    seen = record()

    def poison(step: int) -> None:
        if step == 12:
            with torch.no_grad():
                model.hidden.weight.fill_(torch.nan)

    seen.on_metrics = poison
    with pytest.raises(TrainingDiverged, match="step 13"):
        Trainer(model, text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, StopFlag())
    assert CheckpointFolder(tmp_path).newest().step == 10


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_weights_that_are_no_numbers_never_replace_a_checkpoint(bigram, text, config, changed, record, tmp_path, kind):
    """Also where the loss is reported more rarely than checkpoints are written."""
    config = changed(config, evaluation__logging_steps=100, checkpoint__save_steps=2, checkpoint__save_total_limit=1)
    model = bigram()
    trainer = Trainer(model, text, config, checkpoints=CheckpointFolder(tmp_path))
    plain = trainer._task.loss

    def loss(*given):
        found = plain(*given)
        if trainer.step < 5:
            return found
        return found * torch.nan if kind == "loss" else found + (model.hidden.weight * 0).sum().sqrt()

    trainer._task.loss = loss
    with pytest.raises(TrainingDiverged, match=f"{kind}.* at step 6"):
        trainer.run(record(), StopFlag())
    assert CheckpointFolder(tmp_path).newest().step == 4
    again = bigram()
    assert Trainer(again, text, config, checkpoints=CheckpointFolder(tmp_path)).resume()
    assert all(parameter.isfinite().all() for parameter in again.parameters())


def with_losses(trainer, of_step):
    """Let the losses be those of a function of the number of steps done; gradients are not changed."""
    plain = trainer._task.loss

    def loss(*given):
        found = plain(*given)
        return found - found.detach() + of_step(trainer.step)

    trainer._task.loss = loss


def test_a_model_that_becomes_worse_than_guessing_ends_the_run_and_keeps_the_last_good_checkpoint(
    bigram, text, config, changed, record, tmp_path
):
    config = changed(config, evaluation__logging_steps=1, checkpoint__save_steps=1, checkpoint__save_total_limit=1)
    seen = record()
    trainer = Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path))
    with_losses(trainer, lambda done: 2.0 if done < 7 else 12.0)
    with pytest.raises(TrainingDiverged, match="step 10, far above"):
        trainer.run(seen, StopFlag())
    assert CheckpointFolder(tmp_path).newest().step == 7
    assert max(seen.losses) == 9


def test_a_hard_batch_and_a_bad_beginning_are_no_divergence(bigram, text, config, changed, record):
    trainer = Trainer(bigram(), text, changed(config, evaluation__logging_steps=1))
    with_losses(trainer, lambda done: 12.0 if done in {*range(6), 12, 13, 15, 16} else 2.0)
    seen = record()
    trainer.run(seen, StopFlag())
    assert len(seen.losses) == 30


def test_a_model_without_any_gradient_that_only_guesses_ends_the_run(bigram, text, config, changed, record):
    trainer = Trainer(bigram(), text, changed(config, evaluation__logging_steps=1))
    plain, guess = trainer._task.loss, math.log(text.tokenizer.vocab_size)
    trainer._task.loss = lambda *given: plain(*given) * 0 + (0.0 if trainer.step < 5 else guess)
    with pytest.raises(TrainingDiverged, match="norm is 0 at step 8"):
        trainer.run(record(), StopFlag())


def test_a_text_without_validation_is_trained_on_without_a_validation_loss(bigram, words, config, record):
    from attn_train.tasks.language_modeling import tokenize

    seen = record()
    trainer = Trainer(bigram(), tokenize(words, validation=0.0), config)
    trainer.run(seen, StopFlag())
    assert trainer.validation_loss(3) is None
    assert len(seen.losses) == 30
    assert seen.validation == {}
