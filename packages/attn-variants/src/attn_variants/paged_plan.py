"""The choice of the kernel that reads cached rows in place, made once per dtype, device and form of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from attn_core import AttentionSpec, RaggedBatch, installed
from attn_core.batch import RowsInPlace, StaticRows
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import plans_on_the_host
from attn_core.kernels.attend import (
    LATENT,
    PagedAttendKernel,
    PagedAttendProblem,
    PagedAttentionInputs,
    paged_problem,
)
from attn_core.kernels.dispatch import KernelTable
from torch import Tensor

PLAIN, CODED = ("plain",), ("int8", "int4")
"""The forms of rows that the methods `in_place` and `coded_in_place` of a view return; see `RowsInPlace`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reached:
    """Rows of a cache that a kernel can read in place, and the plan that runs the kernel."""

    plan: PagedPlan
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
        return self.plan.run(operands)


class PagedPlan:
    """The paged attention kernels for one spec; if none supports it, rows are gathered instead.

    `latent` is True for the cached rows of latent attention (MLA).
    """

    def __init__(self, spec: AttentionSpec, *, latent: bool = False) -> None:
        self.spec = spec
        self._forms: Mapping[str, str] = {"plain": LATENT} if latent else {form: form for form in (*PLAIN, *CODED)}
        self._table = KernelTable(installed().kernels, PagedAttendKernel, partial(_problem, spec))

    def reach(self, query: Tensor, view: Any) -> Reached | None:
        """The rows of a view in place, for queries of this dtype and device; None if no kernel reads them in place.

        Raises `NotGraphSafe` if the kernel cannot read them in a step that is recorded as a graph.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        for method, forms in (("in_place", PLAIN), ("coded_in_place", CODED)):
            # Checked before calling the view, as usually no kernel supports the form.
            if not any(self.kernel(query, form) for form in forms) or not hasattr(view, method):
                continue
            rows: RowsInPlace | None = getattr(view, method)()
            kernel = None if rows is None else self.kernel(query, rows.form)
            if kernel is not None and not reads(kernel, rows):
                raise NotGraphSafe(plans_on_the_host(kernel.name))
            if rows is not None and kernel is not None:
                return Reached(plan=self, rows=rows)
        return None

    def run(self, operands: PagedAttentionInputs) -> Tensor | None:
        """The output of the cheapest kernel that runs on this chip; None if there is none."""
        call = self._call(operands.query, operands.rows.form)
        return self._table.run_below(call, lambda kernel: kernel.run(self.spec, operands))

    def kernel(self, query: Tensor, form: str) -> PagedAttendKernel | None:
        """The kernel for queries of this dtype and device over rows of this form, or None."""
        if form not in self._forms or not self._table.kernels:
            return None
        return self._table.find(*self._call(query, form))

    def _call(self, query: Tensor, form: str) -> tuple[torch.dtype, str, str]:
        return query.dtype, query.device.type, self._forms[form]


def reads(kernel: PagedAttendKernel, rows: RowsInPlace | None) -> bool:
    """Whether a kernel can read these rows; static rows are those of steps recorded as a graph."""
    return not isinstance(rows, StaticRows) or kernel.records(rows.max_query_len)


def _problem(spec: AttentionSpec, dtype: torch.dtype, device: str, rows: str) -> PagedAttendProblem:
    return paged_problem(spec, dtype=str(dtype).removeprefix("torch."), device=device, rows=rows)
