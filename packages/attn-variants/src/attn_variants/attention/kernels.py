"""The choice of the kernels that compute a spec, on whole sequences and on a cache in place: once per kind of call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, RaggedBatch, installed
from attn_core.batch import RowsInPlace, StaticRows
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import plans_on_the_host
from attn_core.kernels.attend import (
    LATENT,
    AttendKernel,
    PagedAttendKernel,
    PagedAttentionInputs,
    Varlen,
    attend_problem,
    named_spec,
    paged_problem,
    texts,
)
from attn_core.kernels.dispatch import Operation, say_once
from torch import Tensor
from torch.autograd import forward_ad

from attn_variants.compute.dropout import new_dropout
from attn_variants.kernels.attend import MANY_KEYS, BlockSparse
from attn_variants.tensor_masks import causal_mask, with_placeholder

ALL_SEEN = frozenset({"full", "causal"})
"""The masks for which the choice of a kernel on a CPU does not depend on the lengths."""

COMPILED = 4096
"""The number of queries and keys for which the kernel of a compiled graph, which serves all lengths, is chosen."""


TRIAL = 128
"""The number of tokens of a trial: as many as the largest tiles of kernels have."""


class AttentionKernels:
    """The kernels of one spec. With `name` only that kernel is used, and calls it does not support raise."""

    def __init__(self, spec: AttentionSpec, name: str | None = None) -> None:
        self.spec = spec
        # A tuple, which torch.compile can trace.
        self.weights = tuple(spec.weights.items())
        self.name = name
        describe = partial(attend_problem, spec)
        self._operation: Operation[Any] = Operation(
            installed().kernels, AttendKernel, describe, name, partial(trial, spec)
        )
        self._cautioned: set[tuple[Any, ...]] = set()

    def __reduce__(self) -> Any:
        """Copied and pickled as a new choice for the same spec."""
        return AttentionKernels, (self.spec, self.name)

    def with_mask(self, kind: str = "", *, is_causal: bool = False) -> AttentionKernels:
        """The kernels of the spec with a causal mask too, and with a mask tensor of a kind (`tensor_masks.kind_of`)."""
        if not kind and not is_causal:
            return self
        found: AttentionKernels = getattr(self, self.variant(kind, is_causal))
        return found

    def variant(self, kind: str, is_causal: bool) -> str:  # noqa: FBT001
        """The attribute with the kernels that `with_mask` returns."""
        name = f"_{kind}{is_causal:d}"
        if not hasattr(self, name):
            spec = dataclasses.replace(self.spec, mask=causal_mask(self.spec.mask, is_causal=is_causal))
            setattr(self, name, AttentionKernels(with_placeholder(spec, kind), self.name))
        return name

    def run(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor:
        """Compute the output [batch, query, heads, value_size] by the chosen kernel.

        Documents packed end to end (varlen) that no kernel computes in one call are computed one by one. `spec`, which
        may differ from the own one in tensors only, is computed in its place; see `tensor_masks.with_placeholder`.
        Raises `KernelRefused` if the kernel called `name` does not support the call.
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
        call = self._call(operands)
        if torch.compiler.is_compiling():
            return self._compiled(self._operation.require(**call), spec, operands)
        if operands.key.shape[1] > MANY_KEYS and self.name is None:
            self._caution(call, operands.key.shape[1])
        out: Tensor | None = self._operation.run(lambda kernel: kernel.run(spec, operands), **call)
        if out is None:
            self._operation.refuse(**call)
        return out

    def _call(self, operands: AttentionInputs) -> dict[str, Any]:
        """The fields of `AttendProblem` for a call; lengths are powers of two, or 0 if they do not matter."""
        device, kv_unordered = operands.query.device.type, operands.key_positions is not None
        has_positions = kv_unordered or operands.query_positions is not None
        if kv_unordered or (self.spec.mask.kind in ALL_SEEN and device == "cpu"):
            queries = keys = 0
        elif torch.compiler.is_compiling():
            queries = keys = COMPILED
        else:
            queries, keys = rounded(operands.query.shape[1]), rounded(operands.key.shape[1])
        return {
            "dtype": operands.query.dtype,
            "device": device,
            "gradients": torch.is_grad_enabled(),
            "padded": has_positions or operands.key_padding_mask is not None,
            "has_positions": has_positions,
            "kv_unordered": kv_unordered,
            "dropout": operands.dropout is not None,
            "forward_mode": forward_ad._current_level >= 0,  # noqa: SLF001 -- torch has no public question for it
            "queries": queries,
            "keys": keys,
        }

    def _compiled(self, kernel: AttendKernel, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Run a kernel while torch.compile traces."""
        if kernel.name == BlockSparse.name:
            names = self.masks()
            # Imported here, as it needs torch modules that only processes which compile should load.
            from attn_variants.compute.block_sparse.compiled import attend

            return attend(spec, names, operands)
        return kernel.run_in_graph(spec, self.spec_name() if spec is self.spec else "", operands)

    def _caution(self, call: dict[str, Any], keys: int) -> None:
        """Log, once, the remark of the kernel chosen for a call over many keys."""
        kind = tuple(call.items())
        if kind not in self._cautioned:
            self._cautioned.add(kind)
            kernel = self._operation.require(**call)
            if remark := kernel.remark(self._operation.problem(**call | {"keys": keys})):
                say_once(remark)

    def run_together(self, operands: AttentionInputs, spec: AttentionSpec | None = None) -> Tensor | None:
        """The output for several documents in one call of the cheapest kernel that supports it, or of the kernel
        called `name`; None if there is none."""
        call: dict[str, Any] = {
            "dtype": operands.query.dtype,
            "device": operands.query.device.type,
            "gradients": torch.is_grad_enabled(),
            "padded": operands.key_padding_mask is not None,
            "dropout": operands.dropout is not None,
            "varlen": True,
        }
        if torch.compiler.is_compiling():
            kernel = self._operation.find(**call)
            return None if kernel is None else self._compiled(kernel, spec or self.spec, operands)
        return self._operation.run(lambda kernel: kernel.run(spec or self.spec, operands), **call)

    def spec_name(self) -> str:
        """The name under which compiled graphs refer to the spec; "" if it has none."""
        return named_spec(self.spec)

    def masks(self) -> str:
        """The name under which compiled graphs refer to the mask of the spec."""
        from attn_variants.compute.block_sparse.compiled import named

        return named(self.spec.mask)


def trial(spec: AttentionSpec, kernel: AttendKernel, **call: Any) -> None:
    """Run a kernel, and its backward pass if there are gradients, on zeros of `TRIAL` tokens of this kind of call."""

    def zeros(*shape: int) -> Tensor:
        dtype, device = call["dtype"], call["device"]
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=call["gradients"])

    heads, positions = spec.heads, torch.arange(TRIAL, device=call["device"])[None]
    inputs = AttentionInputs(
        query=zeros(1, TRIAL, heads.query, heads.key_size),
        key=zeros(1, TRIAL, heads.key_value, heads.key_size),
        value=zeros(1, TRIAL, heads.key_value, heads.value_size),
        query_positions=positions if call.get("has_positions") else None,
        key_positions=positions if call.get("kv_unordered") else None,
        key_padding_mask=positions >= 0 if call["padded"] else None,
        parameters={name: zeros(*shape) for name, shape in spec.weights.items()},
        varlen=Varlen.of([TRIAL]) if call.get("varlen") else None,
        dropout=new_dropout(0.5) if call["dropout"] else None,
    )
    with torch.set_grad_enabled(call["gradients"]):
        out = kernel.run(spec, inputs)
        if out.requires_grad:
            torch.autograd.backward(out.sum())


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


PLAIN, CODED = ("plain",), ("float16", "int8", "int4")
"""The forms of rows that the methods `in_place` and `coded_in_place` of a view return; see `RowsInPlace`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InPlaceAttention:
    """Rows of a cache that a kernel can read in place, and the kernels of the spec."""

    kernels: PagedKernels
    rows: RowsInPlace

    def attend(
        self, query: Tensor, batch: RaggedBatch, parameters: Mapping[str, Tensor], requests: Iterable[int]
    ) -> Tensor | None:
        """Outputs [tokens, heads, value_size] of queries [tokens, heads, key_size], defined for these requests only.

        All rows of the step must already be in the cache. None, with one log message, if no kernel runs on this chip.
        """
        operands = PagedAttentionInputs(
            query=query, batch=batch, rows=self.rows, requests=tuple(requests), parameters=parameters
        )
        return self.kernels.run(operands)


class PagedKernels:
    """The paged attention kernels for one spec; if none supports it, rows are gathered instead.

    `latent` is True for the cached rows of latent attention (MLA).
    """

    def __init__(self, spec: AttentionSpec, *, latent: bool = False) -> None:
        self.spec = spec
        self._forms: Mapping[str, str] = {"plain": LATENT} if latent else {form: form for form in (*PLAIN, *CODED)}
        self._operation: Operation[Any] = Operation(
            installed().kernels, PagedAttendKernel, partial(paged_problem, spec)
        )
        # The kinds of queries for which no kernel reads any form: looked up once, not in every step.
        self._gathered: set[tuple[torch.dtype, torch.device]] = set()

    def in_place_attention(self, query: Tensor, view: Any) -> InPlaceAttention | None:
        """The rows of a view in place, for queries of this dtype and device; None if no kernel reads them in place.

        Raises `NotGraphSafe` if the kernel cannot read them in a step that is recorded as a graph.
        """
        kind = query.dtype, query.device
        if kind in self._gathered or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if not any(self.kernel(query, form) for form in self._forms):
            self._gathered.add(kind)
        for method, forms in (("in_place", PLAIN), ("coded_in_place", CODED)):
            # Checked before calling the view, as usually no kernel supports the form.
            if not any(self.kernel(query, form) for form in forms) or not hasattr(view, method):
                continue
            rows: RowsInPlace | None = getattr(view, method)()
            kernel = None if rows is None else self.kernel(query, rows.form)
            if kernel is not None and not reads(kernel, rows):
                if query.device.type == "cpu":
                    return None  # steps are recorded here only where a GPU is pretended, which has no kernels of a CPU
                raise NotGraphSafe(plans_on_the_host(kernel.name))
            if rows is not None and kernel is not None:
                return InPlaceAttention(kernels=self, rows=rows)
        return None

    def run(self, operands: PagedAttentionInputs) -> Tensor | None:
        """The output of the cheapest kernel that runs on this chip; None if there is none."""
        call = self._call(operands.query, operands.rows.form)
        return self._operation.run(lambda kernel: kernel.run(self.spec, operands), **call)

    def kernel(self, query: Tensor, form: str) -> PagedAttendKernel | None:
        """The kernel for queries of this dtype and device over rows of this form, or None."""
        if form not in self._forms or not self._operation.kernels:
            return None
        return self._operation.find(**self._call(query, form))

    def _call(self, query: Tensor, form: str) -> dict[str, Any]:
        return {"dtype": query.dtype, "device": query.device.type, "rows": self._forms[form]}


def reads(kernel: PagedAttendKernel, rows: RowsInPlace | None) -> bool:
    """Whether a kernel can read these rows; static rows are those of steps recorded as a graph."""
    return not isinstance(rows, StaticRows) or kernel.records(rows.max_query_len)


# torch.compile calls these while tracing and keeps their results as constants, as for `Operation.index`.
AttentionKernels.spec_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
AttentionKernels.variant._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
AttentionKernels.masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
