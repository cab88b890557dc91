"""What is measured for validation does not depend on the batch size of training."""

from __future__ import annotations

import pytest
import torch
from attn_schema.training import DataConfig, OptimizerConfig, TrainingConfig
from attn_train.tasks.base import VALIDATION_ROWS
from attn_train.worker import build_model
from small_tasks import EVERY

BATCHES = 2


@pytest.mark.parametrize("made", EVERY, ids=lambda made: made.__name__)
def test_every_batch_size_measures_the_same_tokens(words, tmp_path, monkeypatch, made):
    monkeypatch.setattr("attn_train.tasks.base.VALIDATION_TOKENS", 100)
    model_config, dataset = made(words, tmp_path)

    def measured(batch_size, accumulated=1):
        optimizer = OptimizerConfig(batch_size=batch_size, gradient_accumulation_steps=accumulated)
        task = dataset.task(TrainingConfig(model=model_config, data=DataConfig(dataset="/x"), optimizer=optimizer))
        parts = []
        loss = task.validation_loss(model, BATCHES, lambda: parts.append(1))
        return loss, len(parts)

    torch.manual_seed(0)
    model = build_model(TrainingConfig(model=model_config, data=DataConfig(dataset="/x")), dataset)
    with torch.no_grad():
        # So that losses differ clearly between texts.
        for parameter in model.parameters():
            parameter.mul_(3)
    losses = {size: measured(size)[0] for size in (1, 5, VALIDATION_ROWS, 64)}
    losses["2 x 4"] = measured(4, 2)[0]
    assert list(losses.values()) == pytest.approx([losses[1]] * 5, rel=2e-6)
    more = dataset.task(TrainingConfig(model=model_config, data=DataConfig(dataset="/x"))).validation_loss(
        model, BATCHES - 1, lambda: None
    )
    assert abs(more - losses[1]) > 4e-5, "fewer batches measure other tokens"
