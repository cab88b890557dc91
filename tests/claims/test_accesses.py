"""CL-13: how often attention touches slow memory, counted while it runs: by its equation, and in tiles.

Both are FlashAttention's own algorithms (Dao et al. 2022, arXiv 2205.14135): 0, which writes scores and weights, and 1,
which keeps a tile of them in a fast memory of M numbers.
"""

from __future__ import annotations

import math

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads
from attn_variants.compute import plain
from torch import Tensor


class SlowMemory:
    """Matrices that are read and written row by row, and how many numbers were."""

    def __init__(self, **matrices: Tensor) -> None:
        self.matrices = matrices
        self.touched = 0

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        found = self.matrices[name][rows]
        self.touched += found.numel()
        return found.clone()

    def write(self, name: str, values: Tensor, rows: slice = slice(None)) -> None:
        self.matrices[name][rows] = values
        self.touched += values.numel()


def by_equation(memory: SlowMemory, length: int, size: int) -> None:
    """Algorithm 0: scores are written and read, and so are weights."""
    memory.matrices |= {"scores": torch.empty(length, length).double(), "weights": torch.empty(length, length).double()}
    memory.write("scores", memory.read("query") @ memory.read("key").T * size**-0.5)
    memory.write("weights", memory.read("scores").softmax(-1))
    memory.write("out", memory.read("weights") @ memory.read("value"))


def in_tiles(memory: SlowMemory, length: int, size: int, fast: int) -> None:
    """Algorithm 1, in its letters: blocks of keys outside, of queries inside, outputs put right as the sums grow."""
    columns = math.ceil(fast / (4 * size))
    rows = min(columns, size)
    memory.matrices |= {"m": torch.full((length,), -torch.inf).double(), "l": torch.zeros(length).double()}
    for j in (slice(start, start + columns) for start in range(0, length, columns)):
        key, value = memory.read("key", j), memory.read("value", j)
        for i in (slice(start, start + rows) for start in range(0, length, rows)):
            query, out, m, total = (memory.read(name, i) for name in ("query", "out", "m", "l"))
            scores = query @ key.T * size**-0.5
            top = torch.maximum(m, scores.amax(-1))
            powers, faded = torch.exp(scores - top[:, None]), torch.exp(m - top) * total
            new = faded + powers.sum(-1)
            memory.write("out", (faded[:, None] * out + powers @ value) / new[:, None], i)
            memory.write("m", top, i)
            memory.write("l", new, i)


def counted(length: int, size: int, fast: int | None) -> tuple[int, Tensor, Tensor]:
    """Numbers read and written, the output, and that of the plain computation."""
    torch.manual_seed(0)
    given = {name: torch.randn(length, size, dtype=torch.float64) for name in ("query", "key", "value")}
    memory = SlowMemory(**given, out=torch.zeros(length, size, dtype=torch.float64))
    if fast is None:
        by_equation(memory, length, size)
    else:
        in_tiles(memory, length, size, fast)
    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=size, value_size=size))
    expected = plain.attend(spec, AttentionInputs(**{name: rows[None, :, None] for name, rows in given.items()}))
    return memory.touched, memory.matrices["out"], expected[0, :, 0]


@pytest.mark.parametrize(("length", "size", "fast"), [(64, 8, None), (64, 8, 256), (60, 8, 200), (50, 4, 64)])
def test_cl_13_both_algorithms_give_attention_and_touch_what_the_paper_counts(
    length: int, size: int, fast: int | None
) -> None:
    touched, found, expected = counted(length, size, fast)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    if fast is None:
        assert touched == 4 * length * size + 4 * length**2
    else:
        passes = math.ceil(length / math.ceil(fast / (4 * size)))
        assert touched == 2 * length * size + passes * (3 * length * size + 4 * length)


def test_cl_13_tiles_touch_less_where_a_head_is_small_beside_the_fast_memory() -> None:
    """Θ(n²d²/M) against Θ(nd + n²): less where d² is well below M, and more where it is not."""
    touched = {fast: counted(256, 8, fast)[0] for fast in (512, 1024, 2048)}
    assert max(touched.values()) < counted(256, 8, None)[0]
    assert touched[512] / touched[1024] == pytest.approx(2, abs=0.1)
    assert touched[1024] / touched[2048] == pytest.approx(2, abs=0.15)
    assert counted(512, 8, 1024)[0] / touched[1024] == pytest.approx(4, abs=0.15)
    assert counted(256, 8, 64)[0] > counted(256, 8, None)[0]
