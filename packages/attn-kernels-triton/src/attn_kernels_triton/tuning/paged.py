"""What is measured of decoding over pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from attn_core import AttentionSpec, Causal, Heads, RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.kernels.paged import PagedOperands

from attn_kernels_triton.paged.attend import launches
from attn_kernels_triton.tuning.candidates import PAGED, paged_name
from attn_kernels_triton.tuning.trial import Trial

REQUESTS, CONTEXT = 16, 8191


class Shape(NamedTuple):
    """Heads of queries and of keys, sizes of keys and of values; where `latent`, all heads share one latent."""

    query: int
    shared: int
    key: int
    value: int
    latent: bool = False


SHAPES = {
    64: Shape(32, 8, 64, 64),
    128: Shape(32, 8, 128, 128),
    256: Shape(16, 4, 256, 256),
    512: Shape(16, 1, 576, 512, latent=True),
}
"""By width."""


def count() -> int:
    """How many candidates are measured."""
    return sum(map(len, PAGED.values()))


def trials(device: torch.device) -> Iterator[Trial]:
    """A step in which every request decodes one token."""
    for width, candidates in PAGED.items():
        spec, operands = call(SHAPES[width], device)
        out = operands.query.new_empty(REQUESTS, spec.heads.query, spec.heads.value_size)
        for candidate in candidates:
            yield Trial(paged_name(width), candidate, tuple(launches(spec, operands, out, candidate)))


def call(shape: Shape, device: torch.device) -> tuple[AttentionSpec, PagedOperands]:
    """Requests whose rows lie anywhere in memory."""
    held = CONTEXT + 1
    pool = REQUESTS * held

    def rows(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    fields = {"key": rows(pool, shape.shared, shape.key), "value": rows(pool, shape.shared, shape.value)}
    if shape.latent:
        fields = {"latent": rows(pool, shape.value), "rotary_key": rows(pool, shape.key - shape.value)}
    numbers = torch.randperm(pool, device=device).view(REQUESTS, held)
    operands = PagedOperands(
        query=rows(REQUESTS, shape.query, shape.key),
        batch=RaggedBatch.of((1,) * REQUESTS, (CONTEXT,) * REQUESTS, lambda given: torch.tensor(given, device=device)),
        rows=RowsInPlace(fields, numbers, numbers, (0,) * REQUESTS, "plain"),
        requests=tuple(range(REQUESTS)),
        parameters={},
    )
    heads = Heads(query=shape.query, key_value=shape.shared, key_size=shape.key, value_size=shape.value)
    return AttentionSpec(heads=heads, mask=Causal()), operands
