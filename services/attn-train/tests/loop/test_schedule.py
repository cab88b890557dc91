"""The learning rate and the optimiser."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attn_schema.training import OptimizerConfig
from attn_train.optimizer import adamw, learning_rate, optimizer_state, restore_optimizer_state

SPEC = OptimizerConfig(steps=110, batch_size=1, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)


def test_the_rate_rises_to_the_highest_in_the_warm_up_and_ends_at_the_lowest():
    rates = [learning_rate(step, SPEC) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[9] == max(rates)
    assert rates[109] == pytest.approx(0.1)
    assert all(after < before for before, after in itertools.pairwise(rates[9:]))


def test_half_way_down_the_cosine_the_rate_is_the_mean_of_highest_and_lowest():
    assert learning_rate(59, SPEC) == pytest.approx((1.0 + 0.1) / 2)
    assert learning_rate(34, SPEC) == pytest.approx(0.1 + 0.9 * (0.5 + math.sqrt(0.125)))


def test_without_warm_up_and_with_nothing_but_warm_up_every_step_has_a_rate():
    falling = OptimizerConfig(steps=1, batch_size=1, learning_rate=1.0, min_learning_rate=0.1)
    rising = OptimizerConfig(steps=3, batch_size=1, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=3)
    assert learning_rate(0, falling) == pytest.approx(0.1)
    assert [learning_rate(step, rising) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


def test_only_matrices_decay(bigram):
    model = bigram()
    optimizer = adamw(model, SPEC)
    decaying = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decaying}
    assert names == {"embedding.weight", "hidden.weight"}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - SPEC.learning_rate * SPEC.weight_decay if name in names else 1
        torch.testing.assert_close(parameter, before[name] * factor)


def test_restored_moments_are_the_saved_ones(bigram):
    model = bigram()
    optimizer = adamw(model, SPEC)
    assert optimizer_state(model, optimizer) == {}
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_state(model, optimizer).items()}
    other = adamw(model, SPEC)
    restore_optimizer_state(model, other, saved)
    restored = optimizer_state(model, other)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    del saved["exp_avg:norm.bias"]
    with pytest.raises(KeyError, match=r"norm\.bias"):
        restore_optimizer_state(model, adamw(model, SPEC), saved)
