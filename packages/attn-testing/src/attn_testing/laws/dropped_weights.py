"""Weights are dropped in training, and only there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_testing.case import Case
from attn_testing.expect import require, require_same
from attn_testing.law import MechanismLaw
from attn_testing.laws.batch_invariance import PLAN, follow
from attn_testing.laws.decode_equals_forward import silent_where_nothing_decodes

PROBABILITY = 0.5
TOKENS = 9


class DroppedWeights(MechanismLaw):
    """Whole sequences in training lose weights by torch's seed; evaluation and steps lose none."""

    cases_at_most = 4

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.mechanism.drops_weights else f"{case.mechanism.name} drops no weights"

    def test_evaluation_drops_nothing(self, case: Case) -> None:
        rows, source = case.rows(2, TOKENS), case.source(2, TOKENS)
        with torch.no_grad():
            found = case.attend(rows, source, None, dropping(case).layer)
            require_same(found, case.attend(rows, source), "evaluation with dropout and without", 1e-10)

    def test_one_seed_drops_the_same_and_another_others_forward_and_backward(self, case: Case) -> None:
        once, again, other = (gradient(dropping(case), seed) for seed in (3, 3, 4))
        require(torch.equal(once, again), "gradients of two passes by one seed differ")
        require(not torch.equal(once, other), "two seeds drop the same weights")

    def test_what_is_computed_again_for_gradients_drops_the_same(self, case: Case) -> None:
        tried = dropping(case)
        require_same(gradient(tried, 5, again=True), gradient(tried, 5), "gradients of recomputed activations", 1e-10)

    def test_steps_drop_nothing_even_in_training(self, case: Case) -> None:
        if silent_where_nothing_decodes(case):
            return
        names, tried = sorted({name for step in PLAN for name in step}), dropping(case)
        tried.layer.train()
        rows = {name: case.rows(20, seed=10 + name) for name in names}
        sources = {name: case.source(3 + name, seed=30 + name) for name in names}
        found, expected = (follow(served, PLAN, rows, sources) for served in (tried, case))
        for name in names:
            require_same(found[name], expected[name], f"steps with dropout, request {name}", case.tolerance)


def dropping(case: Case) -> Case:
    """The case whose layer, with the same weights, drops."""
    return dataclasses.replace(case, config=dataclasses.replace(case.config, dropout=PROBABILITY))


def gradient(case: Case, seed: int, *, again: bool = False) -> Tensor:
    """The gradient to rows of a pass in training by this seed, perhaps with activations computed again."""
    layer: Any = case.build().train()
    rows, source = case.rows(2, TOKENS).requires_grad_(), case.source(2, TOKENS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if again:
            out = checkpoint(case.attend, rows, source, None, layer, use_reentrant=False)
        else:
            out = case.attend(rows, source, None, layer)
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        found: Tensor = torch.autograd.grad((out * weights).sum(), rows)[0]
    return found
