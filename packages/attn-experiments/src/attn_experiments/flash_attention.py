"""The two algorithms of the FlashAttention paper, run over a simulated slow memory that counts reads and writes.

Dao et al. 2022 (arXiv 2205.14135): algorithm 0 writes the score and weight matrices to slow memory; algorithm 1 keeps
tiles of them in a fast memory of M numbers, with a running maximum score m and a running sum l for every query. Both
give exact attention; they differ in the number of accesses to slow memory. They are for reading and counting; fast
kernels of this kind are `torch_sdpa` and those of attn-kernels-triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_experiments.report import Curves, Result, Settings, judged


class SlowMemory:
    """Matrices that are read and written by rows; `touched` counts the numbers read and written."""

    def __init__(self, **matrices: Tensor) -> None:
        self.matrices = matrices
        self.touched = 0

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A copy of some rows."""
        found = self.matrices[name][rows]
        self.touched += found.numel()
        return found.clone()

    def write(self, name: str, values: Tensor, rows: slice = slice(None)) -> None:
        """Write values to some rows."""
        self.matrices[name][rows] = values
        self.touched += values.numel()


class Run(NamedTuple):
    """The output [length, size], and the count of numbers read from and written to slow memory."""

    out: Tensor
    touched: int


@dataclass(frozen=True)
class Tiles:
    """The blocks of algorithm 1: `columns` keys and `rows` queries at a time, for a fast memory of `fast` numbers."""

    columns: int
    rows: int

    @classmethod
    def of(cls, fast: int, size: int) -> Tiles:
        """The tile sizes B_c = ⌈M / 4d⌉ and B_r = min(B_c, d); raises `InvalidValue` if M is less than 4 d."""
        if fast < 4 * size:
            raise InvalidValue.of("fast", fast, f"at least 4 d = {4 * size} numbers")
        columns = math.ceil(fast / (4 * size))
        return cls(columns=columns, rows=min(columns, size))


def standard_attention(query: Tensor, key: Tensor, value: Tensor) -> Run:
    """Algorithm 0 for inputs [length, size]: scores and weights are each written to slow memory and read again.

    Reads and writes 4 n d + 4 n² numbers.
    """
    length, size = query.shape
    square = query.new_empty(length, length)
    memory = SlowMemory(
        query=query, key=key, value=value, scores=square, weights=square.clone(), out=torch.zeros_like(value)
    )
    memory.write("scores", memory.read("query") @ memory.read("key").T * size**-0.5)
    memory.write("weights", memory.read("scores").softmax(-1))
    memory.write("out", memory.read("weights") @ memory.read("value"))
    return Run(memory.matrices["out"], memory.touched)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, fast: int) -> Run:
    """Algorithm 1 for inputs [length, size] with a fast memory of `fast` numbers, in the paper's letters.

    The outer loop is over blocks of keys, the inner one over blocks of queries; outputs are rescaled as the sums grow.
    Reads and writes 2 n d + ⌈n / B_c⌉ (3 n d + 4 n) numbers. Raises `InvalidValue` if the fast memory is too small for
    a tile.
    """
    length, size = query.shape
    tiles = Tiles.of(fast, size)
    m, total = query.new_full((length,), -torch.inf), query.new_zeros(length)
    memory = SlowMemory(query=query, key=key, value=value, out=torch.zeros_like(value), m=m, l=total)
    for j in blocks(length, tiles.columns):
        k_j, v_j = memory.read("key", j), memory.read("value", j)
        for i in blocks(length, tiles.rows):
            q_i, o_i, m_i, l_i = (memory.read(name, i) for name in ("query", "out", "m", "l"))
            s_ij = q_i @ k_j.T * size**-0.5
            m_new = torch.maximum(m_i, s_ij.amax(-1))
            p_ij, faded = torch.exp(s_ij - m_new[:, None]), torch.exp(m_i - m_new) * l_i
            l_new = faded + p_ij.sum(-1)
            memory.write("out", (faded[:, None] * o_i + p_ij @ v_j) / l_new[:, None], i)
            memory.write("m", m_new, i)
            memory.write("l", l_new, i)
    return Run(memory.matrices["out"], memory.touched)


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most `size` rows that cover `length`."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def accesses(settings: Settings) -> Result:
    """CL-13: the slow memory accesses of both algorithms, counted while they run."""
    size, fast = 16, (128, 512, 2048)
    rows: list[dict[str, int]] = []
    names = ("algorithm 0", *(f"algorithm 1, M = {m}" for m in fast))
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    worst = 0.0
    for length in (32, 64, 128, 256, settings.steps(512)):
        generator = torch.Generator().manual_seed(length)
        query, key, value = torch.randn(3, length, size, generator=generator, dtype=torch.float64)
        exact = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        runs = [standard_attention(query, key, value), *(flash_attention(query, key, value, m) for m in fast)]
        worst = max(worst, *(float((run.out - exact).abs().max()) for run in runs))
        rows.append({"tokens": length} | {name: run.touched for name, run in zip(lines, runs, strict=True)})
        for points, run in zip(lines.values(), runs, strict=True):
            points.append((float(length), float(run.touched)))
    first, *tiled = (points[-1][1] for points in lines.values())
    verdict, because = judged(
        all_of={
            f"every output equals torch's attention (largest difference {worst:.0e})": worst < 1e-12,
            f"tiles touch less with M = {fast[-1]}": tiled[-1] < first,
            f"and with M = {fast[0]}, where d² is {size**2}": tiled[0] < first,
        }
    )
    shown = Curves(title=f"Slow memory touched, d = {size}", x="tokens", y="numbers", lines=lines, logarithmic=True)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)
