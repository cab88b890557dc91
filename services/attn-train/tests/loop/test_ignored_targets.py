"""A batch without any target has a loss of 0, and moves no weight by more than what others would have."""

from __future__ import annotations

import pytest
import torch
from attn_schema.training import DataConfig, OptimizerConfig, TrainingConfig
from attn_train.records import StopFlag
from attn_train.tasks.base import PADDED
from attn_train.trainer import Trainer
from attn_train.worker import build_model
from small_tasks import EVERY, images, masked

PADDING = [made for made in EVERY if made not in (images, masked)]
"""The tasks whose targets may be padding."""


class Emptied:
    """A dataset whose task ignores all targets of some of its batches."""

    def __init__(self, dataset, empty):
        self.dataset, self.empty = dataset, empty

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def task(self, config):
        task, drawn = self.dataset.task(config), []
        whole = task.next_batch

        def next_batch():
            *inputs, targets = whole()
            drawn.append(1)
            return (*inputs, torch.full_like(targets, PADDED) if self.empty(len(drawn)) else targets)

        task.next_batch = next_batch
        return task


def config_of(model, **optimizer):
    return TrainingConfig(
        model=model, data=DataConfig(dataset="/x"), optimizer=OptimizerConfig(steps=4, batch_size=3, **optimizer)
    )


@pytest.mark.parametrize("made", PADDING, ids=lambda made: made.__name__)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("which", ["every second", "all"])
def test_a_job_goes_on_over_batches_without_targets(words, tmp_path, record, made, accumulated, which):
    model_config, dataset = made(words, tmp_path)
    config = config_of(model_config, gradient_accumulation_steps=accumulated)
    config = config.replace(evaluation=config.evaluation.replace(logging_steps=1))
    empty = Emptied(dataset, (lambda number: number % 2 == 1) if which == "every second" else (lambda _: True))
    seen = record()
    trainer = Trainer(build_model(config, dataset), empty, config)
    trainer.run(seen, StopFlag())
    assert len(seen.losses) == 4
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert (sum(seen.losses.values()) == 0) == (which == "all")


@pytest.mark.parametrize("made", PADDING, ids=lambda made: made.__name__)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_micro_batch_without_targets_adds_nothing(words, tmp_path, made, label_smoothing):
    model_config, dataset = made(words, tmp_path)
    config = config_of(model_config, label_smoothing=label_smoothing)
    task, model = dataset.task(config), build_model(config, dataset).eval()
    *inputs, targets = task.next_batch()
    loss = task.loss(model, (*inputs, torch.full_like(targets, PADDED)))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert task.loss(model, (*inputs, targets)).item() > 0
