"""Blocks of tokens in codes: keys in groups of tokens, channel by channel; all else in groups of channels, by token.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750: a few channels of
keys are large in every token, so that a group of one channel has a small range; values have no such channels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import Field, Fields, Paged
from attn_core.errors import InvalidValue
from attn_core.stores import ModelSpecs

from attn_cache.quantised.grouping import Affine, coded
from attn_cache.quantised.row_specs import part_name

if TYPE_CHECKING:
    from torch import Tensor, dtype

WIDTHS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Codes of `bits` bits in groups of `group` numbers; `block` tokens are coded together, once all are there."""

    bits: int = 2
    group: int = 32
    block: int = 128

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise InvalidValue.of("bits", self.bits, f"one of {WIDTHS}")
        if self.group < 1:
            raise InvalidValue.of("group", self.group, "a whole number from 1")
        if self.block < 1 or self.block % self.group:
            raise InvalidValue.of("block", self.block, f"a multiple of the group, {self.group}")

    def specs(self, specs: ModelSpecs) -> ModelSpecs:
        """`specs` with the parts of one block in place of each field that has a row per token."""
        return {
            layer: {
                state: dataclasses.replace(
                    spec,
                    fields={k: v for name, field in spec.fields.items() for k, v in self.parts(name, field).items()},
                )
                if isinstance(spec, Paged)
                else spec
                for state, spec in states.items()
            }
            for layer, states in specs.items()
        }

    def parts(self, name: str, field: Field) -> dict[str, Field]:
        """What is kept of one block of a field; a field that is not coded keeps its rows."""
        if not coded(field):
            return {name: Field((self.block, *field.shape), field.dtype)}
        shape = (*field.shape, self.block) if by_channel(name) else (self.block, *field.shape)
        return {part_name(name, part): row for part, row in self._grouping.parts(shape).items()}

    def encode(self, name: str, field: Field, rows: Tensor) -> dict[str, Tensor]:
        """The parts [blocks, ...] of whole blocks of rows [blocks, block, *shape]."""
        if not coded(field):
            return {name: rows}
        numbers = rows.movedim(1, -1) if by_channel(name) else rows
        return {part_name(name, part): found for part, found in self._grouping.encode(numbers).items()}

    def decode(self, name: str, field: Field, kept: Fields, into: dtype) -> Tensor:
        """The rows [blocks, block, *shape] that the parts [blocks, ...] stand for."""
        if not coded(field):
            return kept[name]
        parts = {part: kept[part_name(name, part)] for part in self._grouping.parts((self.block,))}
        if by_channel(name):
            return self._grouping.decode(parts, self.block, into).movedim(-1, 1)
        return self._grouping.decode(parts, field.shape[-1], into)

    @property
    def _grouping(self) -> Affine:
        return Affine(self.bits, self.group)


def by_channel(name: str) -> bool:
    """Whether a field of this name holds keys."""
    return "key" in name
