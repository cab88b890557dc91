"""Attention to blocks of keys selected query by query: problem, inputs, kernels, and the choice of a kernel."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import Operation
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
        describe = partial(selected_blocks_problem, SelectedBlocksSpec(heads=heads))
        self.operation: Operation[Any] = Operation(kernels, SelectedBlocksKernel, describe)

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks, inputs: AttentionInputs) -> Tensor:
        """Outputs, see `SelectedBlocksKernel.run`; raises `KernelRefused` where no kernel accepts.

        `inputs` are those from which queries and blocks were made. If this device cannot run the kernel, the next one
        is used, which is logged once.
        """
        query = selected.query
        explicit = inputs.key_padding_mask, inputs.query_positions, inputs.key_positions
        # bool(), because torch.compile makes a symbolic value of a comparison of lengths.
        other_keys = bool(inputs.query.shape[1] != inputs.key.shape[1])
        call: dict[str, Any] = {
            "dtype": query.dtype,
            "device": query.device.type,
            "gradients": any(rows.requires_grad for rows in (query, blocks.key, blocks.value)),
            "padded": other_keys or any(part is not None for part in explicit),
        }
        out: Tensor | None = self.operation.run(lambda kernel: kernel.run(selected, blocks), **call)
        if out is None:
            self.operation.refuse(**call)
        return out
