"""How the last axis of a tensor becomes codes of a few bits: what parts there are, and what they weigh.

Nothing here loads torch before numbers are given, so a price can be asked for in a blink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from attn_core import Field, Fields

if TYPE_CHECKING:
    from torch import Tensor, dtype

SHORTEST = 4
"""Numbers on the last axis below which codes and their scale would weigh more than they save."""


class Grouping(Protocol):
    """Turns tensors [..., size] into parts by name, and back; `form` as in `RowsInPlace`, None for others."""

    @property
    def form(self) -> str | None:
        """The word by which kernels know these parts."""
        ...

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """What stands for a tensor of this shape."""
        ...

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """The parts [..., *part] of numbers [..., size]; a group with one that is not finite has no finite scale."""
        ...

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:
        """The numbers [..., size] that the parts stand for, in this element type."""
        ...


@dataclass(frozen=True)
class Symmetric:
    """One int8 code a number and one scale for the whole last axis: x = scale * code, |code| <= 127.

    The scale is the largest magnitude / 127, so the error of a number is at most 1/254 of it.
    """

    @property
    def form(self) -> str | None:
        """See `Grouping.form`."""
        return "int8"

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """`codes` of the same shape, int8, and a `scale` [...], float16."""
        return {"codes": Field(shape, "int8"), "scale": Field(shape[:-1], "float16")}

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """See `Grouping.encode`."""
        from attn_cache.quantised.numbers import symmetric

        codes, scale = symmetric(numbers)
        return {"codes": codes, "scale": scale}

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:  # noqa: ARG002  one code a number
        """See `Grouping.decode`."""
        scaled: Tensor = parts["codes"] * parts["scale"].float()[..., None]
        return scaled.to(into)


@dataclass(frozen=True)
class Affine:
    """Codes of `bits` bits in groups of `group` neighbours on the last axis: x = low + step * code.

    The step is the range of the group / (2^bits - 1), so the error of a number is at most half of it (Liu et al. 2024,
    "KIVI", arXiv 2402.02750, section 3.1). Codes lie side by side in bytes, the first in the lowest bits.
    """

    bits: int
    group: int

    @property
    def form(self) -> str | None:
        """See `Grouping.form`."""
        return "int4" if (self.bits, self.group) == (4, 32) else None

    def parts(self, shape: tuple[int, ...]) -> dict[str, Field]:
        """`codes` [..., bytes], uint8, and a `step` and a `low` [..., groups], float16."""
        *lead, size = shape
        groups = Field((*lead, -(-size // self.group)), "float16")
        return {"codes": Field((*lead, -(-size * self.bits // 8)), "uint8"), "step": groups, "low": groups}

    def encode(self, numbers: Tensor) -> dict[str, Tensor]:
        """See `Grouping.encode`."""
        from attn_cache.quantised.numbers import affine
        from attn_cache.quantised.packing import pack

        codes, step, low = affine(numbers, self.group, 2**self.bits - 1)
        return {"codes": pack(codes, self.bits), "step": step, "low": low}

    def decode(self, parts: Fields, size: int, into: dtype) -> Tensor:
        """See `Grouping.decode`."""
        from attn_cache.quantised.numbers import from_affine
        from attn_cache.quantised.packing import unpack

        codes = unpack(parts["codes"], self.bits, size)
        return from_affine(codes, parts["step"], parts["low"], self.group).to(into)


def coded(field: Field) -> bool:
    """Whether a field is kept in codes: one that insists on an element type of its own, or is very short, is not."""
    return field.dtype is None and bool(field.shape) and field.shape[-1] >= SHORTEST
