"""What is measured of the forward and backward passes of bands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from attn_core import AttentionSpec, Causal, Full, Heads, Mask, Operands

from attn_kernels_triton.attention.dense_backward import dense_launches
from attn_kernels_triton.attention.forward import Inputs, empty, forward_launch, launch_of
from attn_kernels_triton.attention.gradients import Backwards
from attn_kernels_triton.attention.plan import Plan, plan_of
from attn_kernels_triton.attention.tiles import dense_choice, no_larger
from attn_kernels_triton.tuning.candidates import BACKWARD, CANDIDATES, LONG, kind_of
from attn_kernels_triton.tuning.trial import Trial

MASKS: tuple[Mask, ...] = (Full(), Causal())
LENGTHS = (LONG // 2, 2 * LONG)
HEADS = 16


def count() -> int:
    """How many candidates are measured."""
    return sum(map(len, (*CANDIDATES.values(), *BACKWARD.values()))) * len(MASKS) * len(LENGTHS)


def forward_trials(device: torch.device) -> Iterator[Trial]:
    """Forward programs."""
    for plan, inputs in calls(CANDIDATES, device):
        kind = kind_of(plan.sizes, plan.rule)
        for candidate in CANDIDATES[kind.width]:
            launch = launch_of(plan, inputs, empty(plan, inputs), dense_choice(plan.sizes, candidate))
            yield Trial(kind.name, candidate, (launch,))


def backward_trials(device: torch.device) -> Iterator[Trial]:
    """All backward programs, those of one candidate together."""
    for plan, inputs in calls(BACKWARD, device):
        kind = kind_of(plan.sizes, plan.rule)
        result = empty(plan, inputs)
        forward_launch(plan, inputs, result).run(device)
        found = Inputs(*map(torch.empty_like, inputs))
        work = Backwards(inputs, result, torch.randn_like(result.out), torch.empty_like(result.lse), found)
        for candidate in BACKWARD[kind.width]:
            choices = tuple(no_larger(choice, plan.sizes) for choice in candidate)
            yield Trial(kind.backward, candidate, tuple(dense_launches(plan, work, choices)))


def calls(widths: Iterable[int], device: torch.device) -> Iterator[tuple[Plan, Inputs]]:
    """Random operands of every width and length, under every mask."""
    for width in widths:
        heads = Heads(query=HEADS, key_value=HEADS, key_size=width, value_size=width)
        for length in LENGTHS:
            inputs = Inputs(*torch.randn(3, 1, length, HEADS, width, device=device).bfloat16())
            operands = Operands(query=inputs.query, key=inputs.key, value=inputs.value)
            for mask in MASKS:
                yield plan_of(AttentionSpec(heads=heads, mask=mask), operands), inputs
