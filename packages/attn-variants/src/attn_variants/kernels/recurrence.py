"""Kernels of linear recurrences in PyTorch: chunk by chunk, and token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, Condition
from attn_core.kernels.recurrence import RecurrenceKernel, RecurrenceProblem, Steps

if TYPE_CHECKING:
    from torch import Tensor

FAR = 64.0
"""The cost of computing a sequence of several tokens token by token, whatever its length."""


class PlainChunked(RecurrenceKernel):
    """The chunked form: supports every recurrence, but is not preferred for a single token."""

    name = "plain_chunked"
    summary = "linear recurrences in torch, chunk by chunk; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {
        field: Anything() for field in RecurrenceProblem.defaults() if field != "batch_invariant"
    }

    def cost(self, problem: RecurrenceProblem) -> float:
        """The unit of costs, 1; 2 for a single token, so that `PlainRecurrent` is preferred."""
        return 2.0 if problem.tokens == 1 else 1.0

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        """The outputs and the state after the last token; see `recurrence_scan.chunked`."""
        from attn_variants.mechanisms.recurrence_scan import chunked

        return chunked(steps, before, chunk)


class PlainRecurrent(RecurrenceKernel):
    """The recurrent form, which defines the result: supports every recurrence, and is used to decode single tokens."""

    name = "plain_recurrent"
    summary = "linear recurrences in torch, token by token; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in RecurrenceProblem.defaults()}

    def cost(self, problem: RecurrenceProblem) -> float:
        """The unit of costs, 1, for one token; `FAR` for more."""
        return 1.0 if problem.tokens == 1 else FAR

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- no chunks here
        """The outputs and the state after the last token; see `recurrence_scan.recurrent`."""
        from attn_variants.mechanisms.recurrence_scan import recurrent

        return recurrent(steps, before)
