"""Which kernel computes a spec, decided once per kind of call."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, installed
from attn_core.kernels.attend import AttendKernel, AttendProblem, attend_problem, named_spec, replaceable_spec, texts
from attn_core.kernels.dispatch import KernelTable, say_once
from torch import Tensor

from attn_variants.kernels.attend import MANY_KEYS, BlockSparse

ALL_SEEN = frozenset({"full", "causal"})
"""Masks under which the choice of a kernel on a CPU does not depend on the lengths."""

COMPILED = 4096
"""Number of queries and keys for which the kernel of a compiled graph, made for all lengths, is chosen."""

VARLEN = True
"""Of the key of a call: rows hold several documents."""

Flags = tuple[bool, bool, bool, bool, bool]
"""Whether gradients are wanted, rows are padded, positions are given, those of keys are, and weights are dropped."""

Lengths = tuple[int, int]
"""Queries and keys, rounded up to powers of two; zeros where not known."""


class KernelPlan:
    """The kernels of one spec. `name` asks for one kernel, which then raises where it refuses."""

    def __init__(self, spec: AttentionSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = name
        self._table = KernelTable(installed().kernels, AttendKernel, partial(_problem, spec), name)
        self._cautioned: set[tuple[Any, ...]] = set()
        self._without: dict[str, KernelPlan] = {}

    def __deepcopy__(self, _memo: object) -> KernelPlan:
        """A new plan of the same spec."""
        return KernelPlan(self.spec, self.name)

    def run(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor:
        """The output [batch, query, heads, value_size] from the chosen kernel; raises `KernelRefused`.

        Varlen texts that no kernel takes together are computed one by one. `spec` is computed instead of the plan's own
        where the two differ in tensors only; see `tensor_masks.without_tensors`.
        """
        spec = spec or self.spec
        device = operands.query.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return self.run(of_one_type(operands, dtype), spec)
        if operands.varlen is not None:
            together = self.run_together(operands, spec)
            if together is not None:
                return together
            if torch.compiler.is_compiling():
                # Made by a part of torch that only a process which compiles need load.
                from attn_variants.compute.in_graph import uncompiled

                apart: Tensor = uncompiled(self.run, operands)
                return apart
            return torch.cat([operands.query.new_empty(no_rows(operands)), *map(self.run, texts(operands))], dim=1)
        query = operands.query
        kv_unordered = operands.key_positions is not None
        has_positions = kv_unordered or operands.query_positions is not None
        padded, drops = has_positions or operands.key_padding_mask is not None, operands.dropout is not None
        flags = torch.is_grad_enabled(), padded, has_positions, kv_unordered, drops
        if kv_unordered or (self.spec.mask.kind in ALL_SEEN and device == "cpu"):
            lengths = (0, 0)
        elif torch.compiler.is_compiling():
            lengths = (COMPILED, COMPILED)
        else:
            lengths = (rounded(query.shape[1]), rounded(operands.key.shape[1]))
        call = query.dtype, device, flags, lengths
        if torch.compiler.is_compiling():
            return self._compiled(self._table.require(*call), spec, operands)
        if operands.key.shape[1] > MANY_KEYS:
            self._caution(call, operands.key.shape[1])
        return self._table.run(call, lambda kernel: kernel.run(spec, operands))

    def run_without(self, operands: AttentionInputs, kernel: str) -> Tensor:
        """The same by any other kernel than the one of this name."""
        if kernel not in self._without:
            self._without[kernel] = KernelPlan(self.spec)
            self._without[kernel]._table.leave_out(kernel)  # noqa: SLF001 -- of this class
        return self._without[kernel].run(operands)

    def _compiled(self, kernel: AttendKernel, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The same in a graph."""
        if kernel.name == BlockSparse.name:
            names = self.masks()
            # Its operators are made by a part of torch that only a process which compiles need load.
            from attn_variants.compute.block_sparse.compiled import attend

            return attend(spec, names, operands)
        return kernel.run_in_graph(spec, self.spec_name() if spec is self.spec else "", operands)

    def _caution(self, call: tuple[Any, ...], keys: int) -> None:
        """Say once what is to be said of the kernel of a call over many keys, unless it was asked for by name."""
        if self.name is not None or call in self._cautioned:
            return
        self._cautioned.add(call)
        kernel = self._table.require(*call)
        if remark := kernel.remark(dataclasses.replace(_problem(self.spec, *call), keys=keys)):
            say_once(remark)

    def run_together(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor | None:
        """The output for several documents in one call of the cheapest kernel, or the one of this plan's name, that
        takes them so; None where none does."""
        query = operands.query
        padded, drops = operands.key_padding_mask is not None, operands.dropout is not None
        flags = torch.is_grad_enabled(), padded, False, False, drops
        call = query.dtype, query.device.type, flags, (0, 0), VARLEN
        if torch.compiler.is_compiling():
            kernel = self._table.find(*call)
            return None if kernel is None else self._compiled(kernel, spec or self.spec, operands)
        return self._table.run_below(call, lambda kernel: kernel.run(spec or self.spec, operands))

    def spec_name(self) -> str:
        """The name of the spec in a compiled graph, by which others compute it where this chip cannot run the kernel,
        unless that was asked for by name; "" where it has none."""
        return named_spec(self.spec) if self.name else replaceable_spec(self.spec, self.run_without)

    def masks(self) -> str:
        """The names of the masks in a compiled graph."""
        from attn_variants.compute.block_sparse.compiled import named

        return named(self.spec.mask)


def _problem(
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: str,
    flags: Flags,
    lengths: Lengths,
    varlen: bool = False,  # noqa: FBT001, FBT002 -- part of a key
) -> AttendProblem:
    gradients, padded, has_positions, kv_unordered, drops = flags
    return attend_problem(
        spec,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        gradients=gradients,
        padded=padded,
        has_positions=has_positions,
        kv_unordered=kv_unordered,
        dropout=drops,
        varlen=varlen,
        queries=lengths[0],
        keys=lengths[1],
    )


def of_one_type(operands: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    """Operands whose queries, keys and values are of the type that autocast asks for; float64 stays, as in torch."""
    if operands.query.dtype == torch.float64:
        return operands
    names = ("query", "key", "value")
    return dataclasses.replace(operands, **{name: getattr(operands, name).to(dtype) for name in names})


def no_rows(operands: AttentionInputs) -> tuple[int, ...]:
    """The shape of an empty output."""
    return operands.query.shape[0], 0, operands.query.shape[2], operands.value.shape[-1]


def rounded(length: int) -> int:
    """The next power of two; 0 stays."""
    return 1 << (length - 1).bit_length() if length else 0


# torch.compile calls this while tracing and keeps the names, as of `KernelTable.index`.
KernelPlan.spec_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
KernelPlan.masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
