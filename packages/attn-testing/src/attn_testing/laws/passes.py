"""Laws of training passes: how a batch is divided, and what is computed again, changes neither gradients nor state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_testing.law import MechanismLaw, require, require_same, seeded
from attn_testing.subject import Case

CLOSE = 1e-10
PARTS = 3
LENGTH = 13
"""Longer than the segments and windows of small layers, so that their further terms are computed."""

Run = Callable[..., Tensor]


def auxiliary_loss(layer: Any) -> Tensor | float:
    """The sum of the auxiliary losses that a layer and its modules have kept, which are cleared; 0 without any."""
    takers = [module for module in layer.modules() if hasattr(module, "take_auxiliary_loss")]
    losses = [taker.take_auxiliary_loss() for taker in takers]
    return sum((loss for loss in losses if loss is not None), start=0.0)


def after_update(layer: Any) -> None:
    """Tell a layer and its modules that its weights were updated, as a training loop on one worker does."""
    for module in layer.modules():
        if hasattr(module, "after_update"):
            module.after_update(lambda value: value)


class MicroBatches(MechanismLaw):
    """The gradients and buffers of an update are the same for one batch of N sequences and for N batches of one."""

    cases_at_most = 2

    def test_a_batch_has_the_gradients_and_buffers_of_its_parts(self, case: Case) -> None:
        if draws(case):
            return
        whole, parts = case.build().train(), case.build().train()
        rows, source = case.rows(PARTS, LENGTH), case.source(PARTS, LENGTH)
        mean_loss(case, whole, rows, source).backward()
        for part in range(PARTS):
            at = slice(part, part + 1)
            loss = mean_loss(case, parts, rows[at], None if source is None else source[at]) / PARTS
            loss.backward()
        require_equal_updates(parts, whole, "of several batches and of one")


class Recomputation(MechanismLaw):
    """Passes that activation checkpointing computes again give the gradients, losses and buffers of usual passes.

    Two passes precede the backward pass, as with pairs of preferences, and a third update follows.
    """

    cases_at_most = 2

    def test_what_is_computed_again_changes_no_gradient_and_no_buffer(self, case: Case) -> None:
        usual, again = case.build().train(), case.build().train()
        for seed in (5, 6):
            for layer, run in ((usual, at_once), (again, recomputed)):
                layer.zero_grad()
                with seeded(seed):
                    losses = [
                        mean_loss(case, layer, case.rows(2, LENGTH, seed=s), case.source(2, LENGTH), run)
                        for s in (seed, seed + 10)
                    ]
                    (losses[0] + 2 * losses[1]).backward()
                    require(auxiliary_loss(layer) == 0.0, "a pass that was computed again keeps an auxiliary loss")
            require_equal_updates(again, usual, "with recomputed activations and without")


def draws(case: Case) -> bool:
    """Whether a training pass depends on torch's generator."""
    with torch.no_grad():
        found = []
        for seed in (3, 4):
            with seeded(seed):
                layer = case.build().train()
                found.append(case.attend(case.rows(1, LENGTH), case.source(1, LENGTH), None, layer))
    return not torch.equal(*found)


def at_once(attend: Run, *given: Any) -> Tensor:
    """Run a pass as usual."""
    return attend(*given)


def recomputed(attend: Run, *given: Any) -> Tensor:
    """Run a pass that the backward pass computes again."""
    out: Tensor = checkpoint(attend, *given, use_reentrant=False)
    return out


def mean_loss(case: Case, layer: Any, rows: Tensor, source: Tensor | None, run: Callable[..., Tensor] = at_once) -> Any:
    """The mean over sequences of a loss of the outputs of rows [batch, tokens, width], plus the auxiliary losses."""
    # A graph for the inputs makes checkpointing compute again even a layer without parameters.
    out = run(case.attend, rows.requires_grad_(), source, None, layer)
    probe = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view_as(out[0])
    return ((out + out.square()) * probe).sum((1, 2)).mean() + auxiliary_loss(layer)


def require_equal_updates(layer: Any, expected: Any, what: str) -> None:
    """Raise `LawBroken` unless gradients and, once both layers know of an update, buffers are equal."""
    for (name, mine), (_, other) in zip(layer.named_parameters(), expected.named_parameters(), strict=True):
        none = [weight.grad is None for weight in (mine, other)]
        require(none[0] == none[1], f"{name} has a gradient in only one of the updates {what}")
        if mine.grad is not None:
            require_same(mine.grad, other.grad, f"gradients of {name} {what}", CLOSE)
    for one in (layer, expected):
        with seeded(7):
            after_update(one)
    for (name, mine), (_, other) in zip(layer.named_buffers(), expected.named_buffers(), strict=True):
        require_same(mine.double(), other.double(), f"buffer {name} {what}", CLOSE)
