"""Quantised cache rows: random codes, and their dequantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

GROUP = 32
"""The number of 4-bit codes that share a step and a minimum value."""


def coded(name: str, form: str, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Random codes of a field [row, head, size] whose values are about N(0, 1), with their scales."""
    rows, heads, size = shape
    device = generator.device

    def drawn(low: int, high: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, heads, width), generator=generator, device=device).to(dtype)

    def near(number: float, *more: int) -> Tensor:
        spread = torch.rand(rows, heads, *more, generator=generator, device=device)
        return (number * (0.5 + spread)).half()

    if form == "int8":
        return {f"{name}.codes": drawn(-127, 128, size, torch.int8), f"{name}.scale": near(1 / 73)}
    groups = size // GROUP
    return {
        f"{name}.codes": drawn(0, 256, size // 2, torch.uint8),
        f"{name}.step": near(0.22, groups),
        f"{name}.low": near(-1.7, groups),
    }


def plain(name: str, fields: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """Unquantised rows at these places."""
    return fields[name][places]


def of_bytes(name: str, fields: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """Dequantised 8-bit rows: code times the scale of its row and head, in float64."""
    return fields[f"{name}.codes"][places].double() * fields[f"{name}.scale"][places].double()[..., None]


def of_halves(name: str, fields: Mapping[str, Tensor], places: Tensor) -> Tensor:
    """Dequantised 4-bit rows: group minimum plus code times step, two codes per byte, low half first, in float64."""
    pairs = fields[f"{name}.codes"][places]
    numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).double().unflatten(-1, (-1, GROUP))
    step, low = (fields[f"{name}.{part}"][places].double()[..., None] for part in ("step", "low"))
    return (low + step * numbers).flatten(-2)


DECODED: Mapping[str, Callable[[str, Mapping[str, Tensor], Tensor], Tensor]] = {
    "plain": plain,
    "int8": of_bytes,
    "int4": of_halves,
}
