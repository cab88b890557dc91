"""Which kernel computes a spec, decided once per kind of call."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec, Kernel, installed
from attn_core.kernels.attend import attend_problem, texts
from attn_core.kernels.base import Problem
from attn_core.kernels.dispatch import choose, explain
from torch import Tensor

from attn_variants.kernels.block_sparse import BlockSparse

ALL_SEEN = frozenset({"full", "causal"})
"""Masks under which the choice of a kernel does not depend on the lengths."""

COMPILED = 4096
"""Number of queries and keys for which the kernel of a compiled graph, made for all lengths, is chosen."""

Flags = tuple[bool, bool, bool, bool, bool]
"""Whether gradients are wanted, rows are padded, positions are given, those of keys are, and weights are dropped."""

Lengths = tuple[int, int]
"""Queries and keys, rounded up to powers of two; zeros where not known."""


class KernelPlan:
    """The kernels of one spec. `name` asks for one kernel, which then raises where it refuses."""

    def __init__(self, spec: AttentionSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = name
        self._kernels: tuple[Kernel, ...] = tuple(installed().kernels)
        self._chosen: dict[tuple[torch.dtype, str, Flags, Lengths], int] = {}
        self._packed: dict[tuple[torch.dtype, str, bool, bool, bool], Kernel | None] = {}

    def __deepcopy__(self, _memo: object) -> KernelPlan:
        """A fresh plan: kernels are compared by identity and are not copied."""
        return KernelPlan(self.spec, self.name)

    def run(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor:
        """The output [batch, query, heads, value_size] from the chosen kernel; raises `KernelRefused`.

        Varlen texts that no kernel takes together are computed one by one. `spec` is computed instead of the plan's own
        where the two differ in tensors only; see `tensor_masks.without_tensors`.
        """
        spec = spec or self.spec
        if operands.varlen is not None:
            kernel = self.packed_kernel(operands)
            if kernel is not None:
                return kernel.run(spec, operands)  # type: ignore[no-any-return]
            return torch.cat([operands.query.new_empty(no_rows(operands)), *map(self.run, texts(operands))], dim=1)
        query = operands.query
        kv_unordered = operands.key_positions is not None
        has_positions = kv_unordered or operands.query_positions is not None
        padded, drops = has_positions or operands.key_padding_mask is not None, operands.dropout is not None
        flags = torch.is_grad_enabled(), padded, has_positions, kv_unordered, drops
        if kv_unordered or self.spec.mask.kind in ALL_SEEN:
            lengths = (0, 0)
        elif torch.compiler.is_compiling():
            lengths = (COMPILED, COMPILED)
        else:
            lengths = (rounded(query.shape[1]), rounded(operands.key.shape[1]))
        index: int = self.index(query.dtype, query.device.type, flags, lengths)
        if torch.compiler.is_compiling() and self._kernels[index].name == BlockSparse.name:
            names = self.masks()
            # Its custom operators load dynamo, which only compiling processes need.
            from attn_variants.compute.block_sparse.compiled import attend

            return attend(spec, names, operands)
        return self._kernels[index].run(spec, operands)  # type: ignore[no-any-return]

    def packed_kernel(self, operands: AttentionInputs) -> Kernel | None:
        """The cheapest kernel, or the one of this plan's name, that takes packed texts together, if any does."""
        query = operands.query
        said = operands.key_padding_mask is not None, operands.dropout is not None
        kind = query.dtype, query.device.type, torch.is_grad_enabled(), *said
        if kind not in self._packed:
            dtype, device, gradients, padded, drops = kind
            problem = self._problem(dtype, device, (gradients, padded, False, False, drops), varlen=True)
            best = explain([k for k in self._kernels if self.name in {None, k.name}], problem)[:1]
            self._packed[kind] = best[0].kernel if best and best[0].accepted else None
        return self._packed[kind]

    def masks(self) -> str:
        """The names of the masks in a compiled graph."""
        from attn_variants.compute.block_sparse.compiled import named

        return named(self.spec.mask)

    def index(self, dtype: torch.dtype, device: str, flags: Flags, lengths: Lengths) -> int:
        """The index of the chosen kernel among the installed ones."""
        key = dtype, device, flags, lengths
        if key not in self._chosen:
            problem = self._problem(dtype, device, flags, queries=lengths[0], keys=lengths[1])
            self._chosen[key] = self._kernels.index(choose(installed().kernels, problem, self.name))
        return self._chosen[key]

    def _problem(self, dtype: torch.dtype, device: str, flags: Flags, **known: bool | int) -> Problem:
        gradients, padded, has_positions, kv_unordered, drops = flags
        return attend_problem(
            self.spec,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            gradients=gradients,
            padded=padded,
            has_positions=has_positions,
            kv_unordered=kv_unordered,
            dropout=drops,
            **known,
        )


def no_rows(operands: AttentionInputs) -> tuple[int, ...]:
    """The shape of an empty output."""
    return operands.query.shape[0], 0, operands.query.shape[2], operands.value.shape[-1]


def rounded(length: int) -> int:
    """The next power of two; 0 stays."""
    return 1 << (length - 1).bit_length() if length else 0


# torch.compile calls these while tracing and keeps number and names; a kernel object could not be kept so. This is all
# that torch.compiler.assume_constant_result does, which would import the compiler, two seconds, into every process.
KernelPlan.index._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
KernelPlan.masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
