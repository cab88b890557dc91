"""Attention whose matrix products are rounded to FP8 (e4m3) as in FlashAttention-3, in plain PyTorch, with sums in
float64 (Shah et al. 2024, arXiv 2407.08608, section 3.3).

It runs on any device. It materializes the scores of all queries for one tile of keys at a time. `rotations` measures
what rotating queries and keys gains (CL-56).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_experiments.report import Result, Settings, judged
from attn_experiments.small_models import mean

ROWS = 128
"""The number of rows that share a scale, and of keys in a tile."""
LARGEST = 448.0
"""The largest number of e4m3."""
LIFTED = 256.0
"""Attention weights, at most 1, are rounded after they are multiplied by this."""
LEAST_WIDTH = 32
"""The smallest number of codes that one matrix instruction of Hopper sums over."""
SEED = 20240711


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Whether queries and keys are rotated, and how many rows share a scale (None: all rows of a tensor)."""

    rotated: bool = True
    rows: int | None = ROWS


SHIPPED = Rounding()


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rounding: Rounding = SHIPPED) -> Tensor:
    """The output [head, query, value_size], float64, for inputs [head, row, size] and a mask `seen` [query, key], bool.

    Every query must see at least one key. Logits are products divided by the square root of the key size.
    """
    scale = query.shape[-1] ** -0.5 * math.log2(math.e)
    if rounding.rotated:
        matrix = rotation(query.shape[-1]).to(query.device)
        query, key = (rotated(rows, matrix) for rows in (query, key))
    query, key, value = (coded(rows, rounding.rows) for rows in (query, key, value))
    summed, total = torch.zeros_like(query[..., :1]), torch.zeros_like(query[..., :1])
    top = torch.full_like(total, -math.inf)
    for first in range(0, key.shape[-2], ROWS):
        here = slice(first, first + ROWS)
        powers = (query @ key[:, here].transpose(1, 2) * scale).masked_fill(~seen[:, here], -math.inf)
        highest = torch.maximum(top, powers.amax(-1, keepdim=True))
        base = highest.nan_to_num(neginf=0.0)
        unnormalized, rescale = torch.exp2(powers - base), torch.exp2(top - base)
        weights = nearest(unnormalized * LIFTED) / LIFTED
        summed = summed * rescale + weights @ value[:, here]
        total, top = total * rescale + unnormalized.sum(-1, keepdim=True), highest
    return summed / total


def rotation(size: int) -> Tensor:
    """A random diagonal of signs times a Hadamard matrix [width, width], float64; `width` is the size of heads, padded
    to a power of two.

    The seed is fixed, so the matrix is always the same. Its entries are 1 and -1: it is not divided by the square root
    of the width.
    """
    width = max(LEAST_WIDTH, 1 << (size - 1).bit_length())
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return signs * matrix


def rotated(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows, padded with zeros, times the orthogonal matrix `matrix` / sqrt(size)."""
    size = len(matrix)
    filled = torch.nn.functional.pad(rows.double(), (0, size - rows.shape[-1]))
    return filled @ matrix / math.sqrt(size)


def coded(rows: Tensor, together: int | None) -> Tensor:
    """Quantize and dequantize rows, float64, with one scale for each `together` rows (None: for all of the tensor)."""
    count = rows.shape[-2]
    several = count if together is None else together
    filled = torch.nn.functional.pad(rows.double(), (0, 0, 0, -count % several))
    filled = filled.view(*filled.shape[:-2], -1, several, filled.shape[-1])
    axes = tuple(range(filled.dim())) if together is None else (-2, -1)
    highest = filled.abs().amax(axes, keepdim=True)
    scale = torch.where(highest == 0, 1.0, highest / LARGEST)
    return (nearest(filled / scale) * scale).flatten(-3, -2)[..., :count, :]


def nearest(numbers: Tensor) -> Tensor:
    """The numbers rounded to e4m3, float64."""
    return numbers.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).double()


WAYS = {
    "one scale": Rounding(rotated=False, rows=None),
    "128 rows a scale": Rounding(rotated=False),
    "rotated": Rounding(rows=None),
    "rotated, 128 rows a scale": SHIPPED,
}
"""The compared roundings: the first is the baseline, the last is that of FlashAttention-3."""
SHAPES = ((1024, 64), (2048, 128), (4096, 256))
"""Sequence lengths and head sizes."""
PUBLISHED = 2.6
"""How many times smaller the error of FlashAttention-3 is than that of the baseline (Shah et al. 2024, section 4.3)."""


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1)."""
    return torch.randn(*shape, generator=generator)


def outliers(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1) + N(0, 100) · Bernoulli(0.001), as in the paper."""
    far = torch.rand(*shape, generator=generator) < 0.001
    return normal(generator, *shape) + 10 * normal(generator, *shape) * far


def channels(generator: torch.Generator, *shape: int) -> Tensor:
    """Samples of N(0, 1) with four channels, the same for all rows, multiplied by 20; all multiplied by 0.2."""
    large = torch.ones(shape[-1])
    large[torch.arange(4) * (shape[-1] // 4)] = 20
    return normal(generator, *shape) * large * 0.2


LAWS: dict[str, Callable[..., Tensor]] = {"normal": normal, "outliers": outliers, "large channels": channels}


def gains(law: str, tokens: int, size: int, seed: int) -> dict[str, float]:
    """How many times smaller than with one scale a tensor the root mean square error of each of `WAYS` is.

    Every query attends to every key. Inputs are rounded to bfloat16 first, so that this rounding is not counted; values
    have no large channels.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key = (LAWS[law](generator, 1, tokens, size).bfloat16() for _ in range(2))
    value = (normal if law == "large channels" else LAWS[law])(generator, 1, tokens, size).bfloat16()
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double())
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    errors = {
        name: float((attend(query, key, value, seen, way) - exact).square().mean().sqrt()) for name, way in WAYS.items()
    }
    return {name: errors["one scale"] / error for name, error in errors.items()}


def rotations(settings: Settings) -> Result:
    """CL-56: how many times smaller the error of FP8 attention is with rotations and with scales of blocks."""
    rows: list[dict[str, object]] = []
    shipped: dict[str, list[float]] = {law: [] for law in LAWS}
    for law in LAWS:
        for usual, size in SHAPES:
            tokens = settings.steps(usual)
            found = [gains(law, tokens, size, seed) for seed in settings.runs]
            means = {name: mean(one[name] for one in found) for name in WAYS}
            rows.append({"inputs": law, "tokens": tokens, "size": size} | {n: f"{g:.2f}" for n, g in means.items()})
            shipped[law].append(means["rotated, 128 rows a scale"])
            settings.say(str(rows[-1]))
    low, high = (f"{pick([*shipped['outliers'], *shipped['large channels']]):.1f}" for pick in (min, max))
    verdict, because = judged(
        all_of={
            f"the error is smaller where elements or channels are outliers ({low} to {high} times)": float(low) > 1.2,
            f"{PUBLISHED} times or more with the paper's outliers at every size": min(shipped["outliers"]) >= PUBLISHED,
            "smaller where nothing is an outlier, too": min(shipped["normal"]) > 1.05,
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
