"""Attention to blocks of keys selected query by query: problem, inputs, kernels, and the choice of a kernel."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import KernelTable
from attn_core.plugins.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class KeyBlocks(NamedTuple):
    """Keys and values in blocks: `key` and `value` [batch, groups, block, within, size], `key_padding_mask` [batch,
    block, within], True where a key is real."""

    key: Tensor
    value: Tensor
    key_padding_mask: Tensor


class SelectedBlocks(NamedTuple):
    """Scaled queries and the blocks chosen for their group.

    `query` [batch, groups, query, shared, size]; `chosen` [batch, groups, query, top], int64: first the query's own
    block, then distinct earlier ones, -1 where there is none; `places` [batch, query], int64, the positions of the
    queries, which see no later keys.
    """

    query: Tensor
    chosen: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class SelectedBlocksSpec:
    """Attention to selected blocks as data."""

    heads: Heads


@dataclass(frozen=True, kw_only=True)
class SelectedBlocksProblem(Problem):
    """Attention to selected blocks; `padded` says that a padding mask or explicit positions are given."""

    operation: ClassVar[str] = "selected_blocks"

    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    padded: bool = False
    gradients: bool = False


def selected_blocks_problem(
    spec: SelectedBlocksSpec, *, dtype: str, device: str, gradients: bool, padded: bool
) -> SelectedBlocksProblem:
    """The problem of attending to selected blocks; `padded` as in `SelectedBlocksProblem`."""
    heads = spec.heads
    return SelectedBlocksProblem(
        key_size=heads.key_size,
        value_size=heads.value_size,
        query_heads=heads.query,
        key_value_heads=heads.key_value,
        padded=padded,
        gradients=gradients,
        dtype=dtype,
        device=device,
    )


class SelectedBlocksKernel(Kernel[SelectedBlocksProblem]):
    """Attends to selected blocks."""

    problem: ClassVar[type[Problem]] = SelectedBlocksProblem

    @abstractmethod
    def run(self, selected: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """Outputs [batch, groups, query, shared, value_size], zeros for a query that sees no key."""


class SelectedBlocksDispatcher:
    """Chooses the kernels by which one layer attends to selected blocks, usually among `installed().kernels`."""

    def __init__(self, kernels: Registry[Kernel[Any]], heads: Heads) -> None:
        self.table = KernelTable(kernels, SelectedBlocksKernel, partial(_problem, SelectedBlocksSpec(heads=heads)))

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks, operands: AttentionInputs) -> Tensor:
        """Outputs, see `SelectedBlocksKernel.run`; raises `KernelRefused` where no kernel accepts.

        `operands` are the inputs from which queries and blocks were made. If this device cannot run the kernel, the
        next one is used, which is logged once.
        """
        call = _call_of(selected, blocks, operands)
        return self.table.run(call, lambda kernel: kernel.run(selected, blocks))


def _call_of(selected: SelectedBlocks, blocks: KeyBlocks, operands: AttentionInputs) -> tuple[Any, str, bool, bool]:
    """The kind of a call: type and device of the queries, whether gradients are needed, and whether there are other
    keys than those of the queries, explicit positions or padding."""
    query = selected.query
    gradients = any(rows.requires_grad for rows in (query, blocks.key, blocks.value))
    given = operands.key_padding_mask, operands.query_positions, operands.key_positions
    # bool(), because torch.compile makes a symbolic value of a comparison of lengths.
    other_keys = bool(operands.query.shape[1] != operands.key.shape[1])
    return query.dtype, query.device.type, gradients, other_keys or any(part is not None for part in given)


def _problem(
    spec: SelectedBlocksSpec,
    dtype: Any,
    device: str,
    gradients: bool,  # noqa: FBT001 -- part of a key
    padded: bool,  # noqa: FBT001 -- part of a key
) -> SelectedBlocksProblem:
    kind = str(dtype).removeprefix("torch.")
    return selected_blocks_problem(spec, dtype=kind, device=device, gradients=gradients, padded=padded)
