"""A run that cannot work says so."""

from __future__ import annotations

import pytest
import torch
from attn_train.checkpoint import CheckpointFolder
from attn_train.records import StopFlag
from attn_train.trainer import Trainer, TrainingDiverged


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


def test_a_text_without_validation_is_trained_on_without_a_validation_loss(bigram, words, config, record):
    from attn_train.tasks.language_modeling import tokenize

    seen = record()
    trainer = Trainer(bigram(), tokenize(words, validation=0.0), config)
    trainer.run(seen, StopFlag())
    assert trainer.validation_loss(3) is None
    assert len(seen.losses) == 30
    assert seen.validation == {}
