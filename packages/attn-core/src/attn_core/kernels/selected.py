"""Attention to blocks of keys chosen query by query: what kernels of the operation `chosen` are asked and given."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn_core.errors import KernelRefused
from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.spec import AttentionSpec
else:
    Tensor = Any

CHOSEN = "chosen"


class KeyBlocks(NamedTuple):
    """Keys and values in blocks: `key` and `value` [batch, groups, block, within, size], `key_padding_mask` [batch,
    block, within], True where a key is real."""

    key: Tensor
    value: Tensor
    key_padding_mask: Tensor


class SelectedBlocks(NamedTuple):
    """Scaled queries and the blocks chosen for their group.

    `query` [batch, groups, query, shared, size]; `chosen` [batch, groups, query, top], int64: first the block that the
    query stands in, then different earlier ones, -1 where there is none; `places` [batch, query], int64, positions,
    beyond which no key is seen.
    """

    query: Tensor
    chosen: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class SelectedBlocksSpec:
    """Attention to chosen blocks as data."""

    heads: Heads


class SelectedBlocksKernel(Kernel):
    """Attends to chosen blocks; has `read` in place of `run`."""

    operation: ClassVar[str] = CHOSEN

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Raise `KernelRefused`: this is another operation."""
        raise KernelRefused(f"kernel {self.name!r} computes {CHOSEN}, not attend", kernel=self.name)

    @abstractmethod
    def read(self, choices: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """Outputs [batch, groups, query, shared, value_size]; a query that sees nothing gives zeros."""


def selected_blocks_problem(
    spec: SelectedBlocksSpec, *, dtype: str, device: str, gradients: bool, padded: bool
) -> Problem:
    """The problem of reading chosen blocks; `padded` says that a key mask or explicit positions are given."""
    heads = spec.heads
    return Problem(
        operation=CHOSEN,
        key_size=heads.key_size,
        value_size=heads.value_size,
        query_heads=heads.query,
        key_value_heads=heads.key_value,
        padded=padded,
        gradients=gradients,
        dtype=dtype,
        device=device,
    )
