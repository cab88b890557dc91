"""AdamW with moments of 8 bits makes the steps of AdamW, whatever the sizes of gradients within a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_core.errors import Incompatible
from attn_schema.optimization import OptimizerConfig
from attn_schema.training import ModelConfig, TrainingConfig
from attn_train import eight_bit
from attn_train.checkpoint import CheckpointFolder
from attn_train.eight_bit import state_bytes
from attn_train.layout import check_layout
from attn_train.optimizer import optimizer_of, optimizer_state
from attn_train.records import Stop, StopFlag
from attn_train.trainer import Trainer
from torch import nn

RATE, BETAS, EPSILON = 1e-3, (0.9, 0.99), 1e-12
CONFIG = OptimizerConfig(optim="adamw_8bit", learning_rate=RATE, weight_decay=0.0, epsilon=EPSILON)


def steps_of_adamw(gradients):
    """The steps of AdamW (arXiv 1711.05101, algorithm 2) in float64, in units of the rate."""
    mean = square = 0.0
    for count, gradient in enumerate(gradients, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        yield mean / (1 - BETAS[0] ** count) / (np.sqrt(square / (1 - BETAS[1] ** count)) + EPSILON)


@pytest.mark.parametrize("signs", ["random", "constant", "rare"])
def test_every_step_of_every_weight_is_that_of_adamw_for_gradients_from_1e_8_to_1(signs, monkeypatch):
    monkeypatch.setattr(eight_bit, "AT_ONCE", 2048)  # so that a weight has several parts, and the last is not whole
    draw = np.random.default_rng(0)
    sizes = 10.0 ** draw.uniform(-8, 0, (75, 67))
    weight = nn.Linear(67, 75, bias=False)
    optimizer = optimizer_of(weight, CONFIG)
    noise = {"random": lambda: draw.standard_normal(sizes.shape), "constant": lambda: np.ones(sizes.shape)}
    noise["rare"] = lambda: draw.standard_normal(sizes.shape) * (draw.random(sizes.shape) < 0.05)
    gradients = [sizes * noise[signs]() for _ in range(300)]
    apart, longest = [], [0.0, 0.0]
    for gradient, theirs in zip(gradients, steps_of_adamw(map(np.float64, gradients)), strict=True):
        nn.init.zeros_(weight.weight)  # so that a step is read without rounding
        weight.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        ours = -weight.weight.detach().double().numpy() / RATE
        apart.append(np.abs(ours - theirs))
        longest = [max(most, np.abs(steps).max()) for most, steps in zip(longest, (ours, theirs), strict=True)]
    assert longest[0] < 1.5 * longest[1]
    assert np.max(apart) < 0.6
    assert np.mean(apart) < 0.04


def test_a_second_moment_decays_when_gradients_have_become_small():
    weight = nn.Linear(64, 64, bias=False)
    optimizer = optimizer_of(weight, CONFIG)
    torch.manual_seed(0)
    large = torch.rand(64, 64) < 0.5
    for step in range(900):
        weight.weight.grad = torch.where(large, 1.0, 1.0 if step < 100 else 1e-3)
        optimizer.step()
    nn.init.zeros_(weight.weight)
    optimizer.step()
    *_, theirs = steps_of_adamw([1.0] * 100 + [1e-3] * 801)
    assert -weight.weight.detach()[~large].mean().item() == pytest.approx(RATE * theirs, rel=0.1)


class Wide(nn.Module):
    """A model with weights of both kinds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.up, self.down = nn.Linear(16, 300), nn.Linear(300, 16)

    def forward(self, tokens):
        rows = self.inner.embedding(tokens)
        return self.inner.output(rows + self.down(self.up(rows).relu()))


def test_states_take_a_byte_for_each_moment_and_float32_where_weights_are_small(bigram):
    model = Wide(bigram())
    optimizer = optimizer_of(model, CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {name: tensor for name, tensor in optimizer_state(model, optimizer).items() if not name.startswith("step")}
    large = sum(tensor.nbytes for name, tensor in held.items() if name.endswith(("up.weight", "down.weight")))
    assert large == 2 * (2 * 4800 + 2 * 4 * 19)
    assert held["exp_avg:inner.embedding.weight"].dtype == held["exp_avg:up.bias"].dtype == torch.float32
    assert state_bytes(model) == sum(tensor.nbytes for tensor in held.values())


def test_a_resumed_run_is_the_same_run_and_its_losses_are_those_of_adamw(bigram, text, config, record, tmp_path):
    def run(optim, folder=None, stop_at=None, resume=False):
        optimizer = OptimizerConfig(optim=optim, steps=40, batch_size=4, learning_rate=1e-2)
        checkpoints = None if folder is None else CheckpointFolder(tmp_path / folder)
        torch.manual_seed(3)
        trainer = Trainer(Wide(bigram()), text, config.replace(optimizer=optimizer), checkpoints=checkpoints)
        flag, seen = StopFlag(), record()
        seen.on_metrics = lambda step: flag.set(Stop.SAVE) if step == stop_at else None
        assert trainer.resume() is resume if checkpoints else True
        trainer.run(seen, flag)
        return seen.losses, trainer.model.state_dict()

    (whole, weights), (plain, _) = run("adamw_8bit"), run("adamw")
    run("adamw_8bit", "job", stop_at=17)
    rest, resumed = run("adamw_8bit", "job", resume=True)
    assert rest == {step: whole[step] for step in range(18, 41)}
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())
    assert whole != plain
    fallen = plain[1] - plain[40]
    assert fallen > 0.1
    assert whole[40] == pytest.approx(plain[40], abs=0.05 * fallen)


@pytest.mark.parametrize("shared", [{"dp_shard": 2}, {"tp": 2}])
def test_workers_that_hold_parts_of_weights_are_refused(bigram, shared):
    config = TrainingConfig(model=ModelConfig(), optimizer=CONFIG.replace(batch_size=2), workers=2, **shared)
    with pytest.raises(Incompatible, match="adamw_8bit"):
        check_layout(bigram(), config)
