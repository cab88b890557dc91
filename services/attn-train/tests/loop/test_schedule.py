"""The learning rate and the optimiser."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_schema.training import OptimizerConfig
from attn_train.checkpoint import CheckpointFolder
from attn_train.optimizer import learning_rate, optimizer_of, optimizer_state, restore_optimizer_state
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer

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


def test_noam_is_the_formula_of_the_transformer_s_paper():
    """lrate = d^-0.5 · min(step^-0.5, step · warmup^-1.5), steps from 1 (Vaswani et al. 2017, equation 3)."""
    config = OptimizerConfig(steps=20_000, learning_rate=1.0, lr_scheduler_type="noam", warmup_steps=4000)
    for step in (1, 100, 3999, 4000, 4001, 16_000):
        assert learning_rate(step - 1, config, 512) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))
    assert learning_rate(3999, config, 512) == pytest.approx(6.98771e-4, rel=1e-5)
    assert learning_rate(7, config.replace(learning_rate=2.0), 512) == 2 * learning_rate(7, config, 512)
    with pytest.raises(InvalidValue, match="hidden_size"):
        learning_rate(0, config)


def test_inverse_square_root_falls_from_the_given_peak():
    config = OptimizerConfig(steps=1000, learning_rate=0.5, lr_scheduler_type="inverse_sqrt", warmup_steps=16)
    assert [learning_rate(step, config) for step in (0, 15, 63, 255)] == pytest.approx([0.5 / 16, 0.5, 0.25, 0.125])


def test_halving_is_sutskever_s_five_of_seven_and_a_half_epochs():
    """Rate 0.7 for 5 epochs, then halved every half epoch, 7.5 epochs in all; an epoch of 100 steps here."""
    config = OptimizerConfig(steps=750, learning_rate=0.7, optim="sgd", lr_scheduler_type="halving")
    expected = [0.7 if step < 500 else 0.7 / 2 ** ((step - 500) // 50 + 1) for step in range(750)]
    assert [learning_rate(step, config) for step in range(750)] == pytest.approx(expected)
    luong = config.replace(steps=1200, learning_rate=1.0, start_decay_steps=500, decay_steps=100)
    assert [learning_rate(step, luong) for step in (499, 500, 599, 600, 1199)] == [1, 0.5, 0.5, 0.25, 2**-7]


def test_linear_and_constant_schedules_are_what_they_say():
    linear = OptimizerConfig(steps=10, learning_rate=1.0, min_learning_rate=0.2, lr_scheduler_type="linear")
    assert [learning_rate(step, linear) for step in range(10)] == pytest.approx([1 - 0.08 * (n + 1) for n in range(10)])
    constant = OptimizerConfig(steps=9, learning_rate=0.3, lr_scheduler_type="constant", warmup_steps=3)
    assert [learning_rate(step, constant) for step in (0, 2, 3, 8)] == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_wsd_warms_up_stays_and_falls_on_a_line():
    config = OptimizerConfig(
        steps=20, learning_rate=1.0, min_learning_rate=0.2, lr_scheduler_type="wsd", warmup_steps=4, decay_steps=8
    )
    rates = [learning_rate(step, config) for step in range(20)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 9, *[1 - 0.1 * n for n in range(1, 9)]])
    with pytest.raises(InvalidValue, match=r"decay_steps.*1 to 16"):
        config.replace(decay_steps=17).__post_init__()


def test_muon_moves_hidden_matrices_by_their_orthogonal_part_and_the_rest_by_adamw(bigram):
    model = bigram()
    config = OptimizerConfig(optim="muon", learning_rate=0.1, weight_decay=0.0)
    optimizer = optimizer_of(model, config)
    torch.manual_seed(0)
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    gradients["hidden.weight"] = torch.linalg.qr(gradients["hidden.weight"])[0] * torch.linspace(0.5, 2, 16)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    optimizer.step()
    moved = before["hidden.weight"] - model.hidden.weight.detach()
    # Scaled as arXiv 2502.16982, equation 4: 0.2 √16 times the rate; Newton-Schulz comes near to singular values of 1.
    singular = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 16**0.5)
    assert 0.5 < singular.min() <= singular.max() < 1.5
    # The first step of Adam is the rate, in the direction of the sign.
    for name in ("embedding.weight", "hidden.bias", "norm.weight"):
        change = before[name] - dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(change, 0.1 * gradients[name].sign(), rtol=1e-3, atol=1e-4)


def updates(config: OptimizerConfig, gradients: list[float]) -> list[float]:
    """The values that one parameter, at first 1, takes."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    optimizer, values = optimizer_of(model, config), []
    for gradient in gradients:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        values.append(model.weight.item())
    return values


def test_adadelta_makes_the_steps_of_its_paper():
    """Zeiler 2012, algorithm 1: x -= RMS[Δx] / RMS[g] · g."""
    gradients, squares, moves, value, expected = [1.0, -2.0, 0.5, 0.0, 3.0], 0.0, 0.0, 1.0, []
    for gradient in gradients:
        squares = 0.95 * squares + 0.05 * gradient**2
        move = -math.sqrt(moves + 1e-6) / math.sqrt(squares + 1e-6) * gradient
        moves = 0.95 * moves + 0.05 * move**2
        value += move
        expected.append(value)
    assert updates(OptimizerConfig(optim="adadelta", learning_rate=1.0), gradients) == pytest.approx(
        expected, rel=1e-12
    )


def test_sgd_goes_down_the_gradient_and_keeps_its_momentum():
    assert updates(OptimizerConfig(optim="sgd", learning_rate=0.5), [1.0, -2.0]) == [0.5, 1.5]
    moving = OptimizerConfig(optim="sgd", learning_rate=0.5, momentum=0.5)
    assert updates(moving, [1.0, 1.0, 0.0]) == [0.5, 0.5 - 0.75, 0.5 - 0.75 - 0.375]


def test_adam_has_the_epsilon_that_is_asked_for():
    asked = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, beta1=0.9, beta2=0.98, epsilon=1.0)
    assert updates(asked, [2.0]) == pytest.approx([1 - 0.1 * 2 / (2 + 1.0)])


@pytest.mark.parametrize(
    "fields",
    [
        {"optim": "sgd"},
        {"optim": "sgd", "momentum": 0.9},
        {"optim": "adadelta", "learning_rate": 1.0},
        {"optim": "sgd", "lr_scheduler_type": "halving", "start_decay_steps": 4, "decay_steps": 3},
        {"lr_scheduler_type": "inverse_sqrt"},
        {"lr_scheduler_type": "wsd", "decay_steps": 4},
        {"optim": "muon"},
        {"gradient_accumulation_steps": 3},
    ],
)
def test_a_run_with_any_optimizer_and_schedule_resumes_bit_for_bit(fields, bigram, text, config, record, tmp_path):
    optimizer = OptimizerConfig(**{"steps": 12, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 2, **fields})
    config = config.replace(optimizer=optimizer)
    whole = record()
    Trainer(bigram(), text, config).run(whole, StopFlag())
    flag, seen = StopFlag(), record()
    seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == 6 else None
    Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path)).run(seen, flag)
    last, seen = Trainer(bigram(), text, config, checkpoints=CheckpointFolder(tmp_path)), record()
    assert last.resume()
    last.run(seen, StopFlag())
    assert seen.losses == {step: whole.losses[step] for step in range(7, 13)}
    assert whole.losses[12] != whole.losses[1]


def test_only_matrices_decay(bigram):
    model = bigram()
    optimizer = optimizer_of(model, SPEC)
    decaying = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decaying}
    assert names == {"embedding.weight", "hidden.weight"}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 1.0 * 0.1 if name in names else 1
        torch.testing.assert_close(parameter, before[name] * factor)


def test_restored_moments_are_the_saved_ones(bigram):
    model = bigram()
    optimizer = optimizer_of(model, SPEC)
    assert optimizer_state(model, optimizer) == {}
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_state(model, optimizer).items()}
    other = optimizer_of(model, SPEC)
    restore_optimizer_state(model, other, saved, SPEC)
    restored = optimizer_state(model, other)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    del saved["exp_avg:norm.bias"]
    with pytest.raises(CheckpointInvalid, match=r"norm\.bias"):
        restore_optimizer_state(model, optimizer_of(model, SPEC), saved, SPEC)
