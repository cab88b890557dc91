"""What an exported request of coded blocks consists of: codes of whole blocks, and the rows after them as they are."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import Paged, StateSpec
from attn_core.stores import ModelSpecs
from torch import Tensor

from attn_cache.portable.layout import StateLayout
from attn_cache.quantised.blocks import BlockLayout
from attn_cache.rows import first_visible

NEWEST = ".newest"
"""Behind the name of a state: its rows that are not codes yet."""


@dataclass(frozen=True)
class WholeBlocks(Paged):
    """The codes of a state, a row a block of `block` tokens."""

    block: int = 1


@dataclass(frozen=True)
class NewestRows(Paged):
    """The rows of a state after its last whole block of `block` tokens."""

    block: int = 1


def visible(tokens: int, window: int | None, block: int) -> tuple[range, range]:
    """The whole blocks, by number, and the positions after them that the token after the first `tokens` can see."""
    first, whole = first_visible(tokens, window), tokens // block
    return range(min(first // block, whole), whole), range(max(first, whole * block), tokens)


class BlockStateLayout(StateLayout):
    """The states of a model in a store of coded blocks."""

    def __init__(self, specs: ModelSpecs, layout: BlockLayout, dtype: str) -> None:
        super().__init__(_exported(specs, layout), dtype)

    def _count(self, spec: StateSpec, tokens: int, first: Tensor) -> int:
        if isinstance(spec, WholeBlocks):
            return len(visible(tokens, spec.window, spec.block)[0])
        if isinstance(spec, NewestRows):
            return len(visible(tokens, spec.window, spec.block)[1])
        return super()._count(spec, tokens, first)


def _exported(specs: ModelSpecs, layout: BlockLayout) -> ModelSpecs:
    found: dict[str, dict[str, StateSpec]] = {}
    for layer, states in layout.specs(specs).items():
        found[layer] = {}
        for name, coded in states.items():
            plain = specs[layer][name]
            if isinstance(plain, Paged):
                found[layer][name] = WholeBlocks(coded.fields, window=plain.window, block=layout.block)
                found[layer][name + NEWEST] = NewestRows(plain.fields, window=plain.window, block=layout.block)
            else:
                found[layer][name] = plain
    return found
