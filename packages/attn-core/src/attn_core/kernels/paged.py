"""Attention of new rows to remembered ones where they lie: what kernels of `attend_paged` are asked and given."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attn_core.batch import RaggedBatch, RowsInPlace
from attn_core.errors import KernelRefused
from attn_core.kernels.attend import AttentionInputs, attend_problem
from attn_core.kernels.base import Kernel, Problem
from attn_core.masks.bands import band_of
from attn_core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

PAGED = "attend_paged"
BAND = "band"
"""The mask, in a paged problem, of a query that sees itself and all, or the last so many, before it."""
LATENT = "latent"
"""The rows, in a paged problem, of latent attention: see `PagedAttentionInputs`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedAttentionInputs:
    """The tensors of one `attend_paged` call.

    `query` [tokens, heads, key_size] are the new rows of the batch, in its order; those of `requests` are wanted, what
    comes out for others means nothing. `rows` are what they meet, this step's included: fields "key" [rows,
    key_value_heads, key_size] and "value"; or of latent attention "latent" [rows, value_size], which is both the value
    and the first part of the key, and "rotary_key" [rows, rest], the other part. `parameters` as in `AttentionInputs`.
    """

    query: Tensor
    batch: RaggedBatch
    rows: RowsInPlace
    requests: tuple[int, ...]
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class PagedKernel(Kernel):
    """Computes attention to rows where a cache keeps them; has `run_paged` in place of `run`.

    Where no kernel accepts, rows are gathered and an `attend` kernel computes the same.
    """

    operation: ClassVar[str] = PAGED

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """Raise `KernelRefused`: this is another operation."""
        raise KernelRefused(f"kernel {self.name!r} computes {PAGED}, not attend", kernel=self.name)

    @abstractmethod
    def run_paged(self, spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
        """The output [tokens, heads, value_size]."""


def paged_problem(spec: AttentionSpec, *, dtype: str, device: str, rows: str = "plain") -> Problem:
    """The problem of meeting remembered rows; `rows` is `RowsInPlace.form`, or `LATENT`."""
    band = band_of(spec.mask)
    whole = attend_problem(spec, dtype=dtype, device=device, gradients=False, padded=False)
    mask = BAND if band is not None and band.right == 0 else spec.mask.kind
    return dataclasses.replace(whole, operation=PAGED, rows=rows, mask=mask)
