"""Laws of costs: the declared cost of whole sequences and of steps equals what torch counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attn_core import Cost as Price
from attn_core import Shape, Step
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attn_testing.law import MechanismLaw, require
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.serving import Serving
from attn_testing.subject import Case

SIZES = ((1, 4, 4), (2, 9, 9), (5, 3, 3), (1, 37, 37))
SOURCE_SIZES = ((1, 4, 7), (2, 9, 3), (5, 3, 4), (1, 26, 37))
"""Batch sizes, queries and keys; the longest sequence that the layer takes is added."""


class Cost(MechanismLaw):
    """The declared FLOPs equal those that torch counts, the declared parameters those of the layer."""

    def test_declared_flops_equal_counted_flops(self, case: Case) -> None:
        layer = plain(case)
        longest = case.config.max_seq_len or case.tokens
        for batch, queries, keys in (*(SOURCE_SIZES if case.cross else SIZES), (1, longest, longest)):
            declared = case.mechanism.cost(case.config, Shape(batch=batch, query=queries, key=keys))
            rows, source = case.rows(batch, queries), case.source(batch, keys)
            found = counted(partial(case.attend, rows, source, None, layer))
            require_price(declared, found, f"batch {batch}, {queries} queries, {keys} keys")

    def test_declared_parameters_equal_those_of_the_layer(self, case: Case) -> None:
        declared = case.mechanism.cost(case.config, Shape()).parameters
        has = sum(weight.numel() for weight in case.layer.parameters())
        require(declared == has, f"{declared} parameters are declared, the layer has {has}")


NEW_TOKENS = (6, 1, 26, 4, 1)
"""The number of new tokens of each request in consecutive steps: a prompt, decoding, and further chunks."""

REQUESTS, SOURCE = 2, 5


class StepCost(MechanismLaw):
    """The declared FLOPs of a step equal those that torch counts in `step` or replay: prompts, chunks and decoding."""

    cases_at_most = 4

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return silent_where_nothing_decodes(case)

    def test_declared_flops_of_steps_equal_those_of_steps(self, case: Case) -> None:
        serving = Serving(case, layer=plain(case))
        for request in range(REQUESTS):
            serving.open(request, case.source(SOURCE))
        remembered = 0
        for new in (*NEW_TOKENS, (case.config.max_seq_len or case.tokens) - sum(NEW_TOKENS) - 1, 1):
            rows = {request: case.rows(new, seed=remembered + request) for request in range(REQUESTS)}
            sizes = Step(batch=REQUESTS, new=new, remembered=remembered, source=SOURCE if case.cross else 0)
            found = counted(partial(serving.step, rows))
            require_price(case.mechanism.cost(case.config, sizes), found, str(sizes))
            remembered += new


def require_price(declared: Price, found: int, what: str) -> None:
    """Raise `LawBroken` unless the declared FLOPs equal `found`, and those of allowed pairs are from 1 to as many."""
    require(declared.flops == found, f"{what}: {declared.flops} FLOPs are declared, {found} were counted")
    require(
        0 < declared.allowed_flops <= declared.flops,
        f"{what}: {declared.allowed_flops} allowed of {declared.flops} FLOPs",
    )


def plain(case: Case) -> Any:
    """A layer that uses the plain kernel, if it can choose among kernels."""
    layer = case.build()
    if hasattr(layer, "use_kernel"):
        layer.use_kernel("plain")
    return layer


def counted(call: Callable[[], object]) -> int:
    """The FLOPs of the matrix products of a call; torch's fused attention is disabled, so that its products count."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
