"""The choice of the kernel that computes a spec, made once per kind of call."""

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
"""The masks for which the choice of a kernel on a CPU does not depend on the lengths."""

COMPILED = 4096
"""The number of queries and keys for which the kernel of a compiled graph, which serves all lengths, is chosen."""

VARLEN = True
"""The last item of the key of a call whose sequences hold several documents."""

Flags = tuple[bool, bool, bool, bool, bool]
"""Whether there are gradients, padding, given positions (of queries or keys), given key positions, and dropout."""

Lengths = tuple[int, int]
"""The numbers of queries and keys, rounded up to powers of two; zeros if they do not matter."""


class KernelPlan:
    """The kernels of one spec. With `name` only that kernel is used, and calls it does not support raise."""

    def __init__(self, spec: AttentionSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = name
        self._table = KernelTable(installed().kernels, AttendKernel, partial(_problem, spec), name)
        self._cautioned: set[tuple[Any, ...]] = set()
        self._without: dict[str, KernelPlan] = {}

    def __reduce__(self) -> Any:
        """Copied and pickled as a new plan of the same spec."""
        return KernelPlan, (self.spec, self.name)

    def run(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor:
        """Compute the output [batch, query, heads, value_size] by the chosen kernel.

        Documents packed end to end (varlen) that no kernel computes in one call are computed one by one. `spec`, which
        may differ from the plan's own in tensors only, is computed in its place; see `tensor_masks.without_tensors`.
        Raises `KernelRefused` if the plan's kernel does not support the call.
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
                # Imported here, as it needs torch modules that only processes which compile should load.
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
        """Like `run`, but without the kernel of this name."""
        if kernel not in self._without:
            self._without[kernel] = KernelPlan(self.spec)
            self._without[kernel]._table.leave_out(kernel)  # noqa: SLF001 -- of this class
        return self._without[kernel].run(operands)

    def _compiled(self, kernel: AttendKernel, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Run a kernel while torch.compile traces."""
        if kernel.name == BlockSparse.name:
            names = self.masks()
            # Imported here, as it needs torch modules that only processes which compile should load.
            from attn_variants.compute.block_sparse.compiled import attend

            return attend(spec, names, operands)
        return kernel.run_in_graph(spec, self.spec_name() if spec is self.spec else "", operands)

    def _caution(self, call: tuple[Any, ...], keys: int) -> None:
        """Log, once, the remark of the kernel chosen for a call over many keys, unless it was chosen by name."""
        if self.name is not None or call in self._cautioned:
            return
        self._cautioned.add(call)
        kernel = self._table.require(*call)
        if remark := kernel.remark(dataclasses.replace(_problem(self.spec, *call), keys=keys)):
            say_once(remark)

    def run_together(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor | None:
        """The output for several documents in one call of the cheapest kernel that supports it, or of the kernel
        named by this plan; None if there is none."""
        query = operands.query
        padded, drops = operands.key_padding_mask is not None, operands.dropout is not None
        flags = torch.is_grad_enabled(), padded, False, False, drops
        call = query.dtype, query.device.type, flags, (0, 0), VARLEN
        if torch.compiler.is_compiling():
            kernel = self._table.find(*call)
            return None if kernel is None else self._compiled(kernel, spec or self.spec, operands)
        return self._table.run_below(call, lambda kernel: kernel.run(spec or self.spec, operands))

    def spec_name(self) -> str:
        """The name under which compiled graphs refer to the spec; "" if it has none.

        Unless the plan names a kernel, another one replaces a kernel that this chip cannot run."""
        return named_spec(self.spec) if self.name else replaceable_spec(self.spec, self.run_without)

    def masks(self) -> str:
        """The name under which compiled graphs refer to the mask of the spec."""
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
    """Convert queries, keys and values to the dtype of autocast; float64 is left as it is, as in PyTorch."""
    if operands.query.dtype == torch.float64:
        return operands
    names = ("query", "key", "value")
    return dataclasses.replace(operands, **{name: getattr(operands, name).to(dtype) for name in names})


def no_rows(operands: AttentionInputs) -> tuple[int, ...]:
    """The shape of an output without queries."""
    return operands.query.shape[0], 0, operands.query.shape[2], operands.value.shape[-1]


def rounded(length: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (length - 1).bit_length() if length else 0


# torch.compile calls these while tracing and keeps their results as constants, as for `KernelTable.index`.
KernelPlan.spec_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
KernelPlan.masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
