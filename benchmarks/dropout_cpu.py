"""How long does attention with dropout take on a CPU, forward and backward?

Causal attention of nanoGPT's Shakespeare recipes (dropout 0.2) with: attn's C++ kernels, with and without dropout;
plain torch with the same mask (Philox in tensors), which was used before them; and torch's own
`scaled_dot_product_attention` with its `dropout_p`, whose mask depends on the order of calls:

    python benchmarks/dropout_cpu.py

Reports milliseconds of wall time: medians and ranges over --turns, with the systems taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads
from attn_core.dropout import Dropout
from attn_kernels_cpu.attention import attention
from attn_kernels_cpu.chip import statement
from attn_variants.compute import plain
from report import write_report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {"cpu": (12, 4, 64, 32), "char": (8, 6, 256, 64), "1024 tokens": (2, 6, 1024, 64)}
"""Shapes by name: batch size, heads, tokens, head size."""
DROPOUT = Dropout(probability=0.2, seed=7)

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--turns", type=int, default=9)
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def systems(heads: int, size: int) -> dict[str, Compute]:
    """The compared functions by name; each computes attention of [batch, heads, tokens, size]."""
    shape = Heads(query=heads, key_value=heads, key_size=size, value_size=size)
    spec, scale = AttentionSpec(heads=shape, mask=Causal()), size**-0.5

    def plainly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = {"query": query, "key": key, "value": value}
        turned = {name: part.transpose(1, 2) for name, part in rows.items()}
        return plain.attend(spec, AttentionInputs(**turned, dropout=DROPOUT)).transpose(1, 2)

    return {
        "ours": lambda *rows: attention(*rows, causal=True, scale=scale, dropout=DROPOUT),
        "ours without dropout": lambda *rows: attention(*rows, causal=True, scale=scale),
        "torch sdpa with dropout_p": lambda *rows: scaled_dot_product_attention(
            *rows, is_causal=True, dropout_p=DROPOUT.probability
        ),
        "torch sdpa without dropout": lambda *rows: scaled_dot_product_attention(*rows, is_causal=True),
        "plain torch, the same mask": plainly,
    }


def milliseconds(compute: Compute, rows: tuple[Tensor, ...]) -> float:
    """The milliseconds of one forward and backward pass."""
    leaves = [part.clone().requires_grad_() for part in rows[:3]]
    start = time.perf_counter()
    compute(*leaves).backward(rows[3])  # type: ignore[no-untyped-call]
    return (time.perf_counter() - start) * 1e3


def measured(shape: str, turns: int) -> Iterator[dict[str, Any]]:
    """One row for each system: its times, and their ratio to attn's."""
    batch, heads, tokens, size = SHAPES[shape]
    torch.manual_seed(1)
    rows = tuple(torch.randn(batch, heads, tokens, size) for _ in range(4))
    computing = systems(heads, size)
    times: dict[str, list[float]] = {name: [] for name in computing}
    for turn in range(turns + 1):
        for name, compute in computing.items():
            took = milliseconds(compute, rows)
            if turn:  # the first one warms up
                times[name].append(took)
    for name, found in times.items():
        ratios = [other / own for other, own in zip(found, times["ours"], strict=True)]
        yield {
            "shape": shape,
            "threads": torch.get_num_threads(),
            "system": name,
            "ms": round(statistics.median(found), 3),
            "min": round(min(found), 3),
            "max": round(max(found), 3),
            "times_ours": round(statistics.median(ratios), 2),
        }


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    before = torch.get_num_threads()
    try:
        for threads in args.threads:
            torch.set_num_threads(threads)
            for shape in args.shapes:
                yield from measured(shape, args.turns)
    finally:
        torch.set_num_threads(before)


def main() -> None:
    args = arguments()
    facts = {
        "question": "milliseconds of causal attention with dropout 0.2, forwards and backwards",
        "chip": statement(),
    }
    write_report("dropout_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
