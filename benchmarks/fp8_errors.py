"""What is the error of FP8 (e4m3) attention relative to float64, and what do rotations and block scales gain?

    python benchmarks/fp8_errors.py --out benchmarks/results/fp8-errors.json

Reports root mean square errors over all elements, averaged over seeds, of `attn_kernels_triton.fp8_reference`, which
rounds as FlashAttention-3 does; `gain` is the ratio of the error with one scale per tensor and no rotation to this
error.
Inputs are first rounded to bfloat16, also for float64, so that this rounding is not counted. Input distributions:
`normal`, N(0, 1); `outliers`, N(0, 1) + N(0, 100) · Bernoulli(0.001) (Shah et al. 2024, arXiv 2407.08608, section 4.3);
`channels`, N(0, 1) with four channels of queries and keys multiplied by 20, then all of these by 0.2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attn_kernels_triton.fp8_reference import Rounding, attend
from report import write_report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, SEEDS = 2, 2
SHAPES = ((1024, 64), (2048, 128), (4096, 128), (4096, 256))
"""Sequence lengths and head sizes; every query attends to every key."""

WAYS = {
    "tensor": Rounding(rotated=False, rows=None),
    "blocks": Rounding(rotated=False),
    "rotated, tensor": Rounding(rows=None),
    "rotated, blocks": Rounding(),
}
"""The compared roundings: the first is the baseline, the last is that of FlashAttention-3."""


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1)."""
    return torch.randn(*shape, generator=generator)


def outliers(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1), of which one element in a thousand is about ten times as large."""
    far = torch.rand(*shape, generator=generator) < 0.001
    return normal(generator, *shape) + 10 * normal(generator, *shape) * far


def channels(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1) with four channels, the same for all rows, multiplied by 20; all multiplied by 0.2."""
    large = torch.ones(shape[-1])
    large[torch.arange(4) * (shape[-1] // 4)] = 20
    return normal(generator, *shape) * large * 0.2


LAWS: dict[str, Callable[..., Tensor]] = {"normal": normal, "outliers": outliers, "channels": channels}


def rows() -> Iterator[dict[str, Any]]:
    """One row for each input distribution, shape and rounding."""
    for law, draw in LAWS.items():
        for length, size in SHAPES:
            found = [errors(draw, length, size, seed) for seed in range(SEEDS)]
            for way in found[0]:
                error = statistics.mean(one[way] for one in found)
                gain = statistics.mean(one["tensor"] / one[way] for one in found)
                yield {"law": law, "tokens": length, "size": size, "way": way, "rmse": error, "gain": gain}


def errors(draw: Callable[..., Tensor], length: int, size: int, seed: int) -> dict[str, float]:
    """The error of each rounding, and of torch's own attention in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    values = outliers if draw is outliers else normal
    query, key = (draw(generator, HEADS, length, size).bfloat16() for _ in range(2))
    value = values(generator, HEADS, length, size).bfloat16()
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double())
    seen = torch.ones(length, length, dtype=torch.bool)
    found = {name: attend(query, key, value, seen, way) for name, way in WAYS.items()}
    found["bfloat16"] = scaled_dot_product_attention(query, key, value).double()
    return {name: float((out - exact).square().mean().sqrt()) for name, out in found.items()}


def main() -> None:
    """Measure the errors and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    write_report("fp8-errors", {"question": __doc__, "heads": HEADS, "seeds": SEEDS}, rows(), parser.parse_args().out)


if __name__ == "__main__":
    main()
