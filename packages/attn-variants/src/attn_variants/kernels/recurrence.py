"""The plain computations of linear recurrences: by chunks, and token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, Condition
from attn_core.kernels.recurrence import RecurrenceKernel, RecurrenceProblem, Steps

if TYPE_CHECKING:
    from torch import Tensor

FAR = 64.0
"""The price of going token by token through a sequence of whatever length."""


class PlainChunked(RecurrenceKernel):
    """Accepts every recurrence; a single token is not worth a chunk."""

    name = "plain_chunked"
    summary = "linear recurrences by chunks in torch; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in RecurrenceProblem.defaults()}

    def cost(self, problem: RecurrenceProblem) -> float:
        """The unit of all costs, but for one token, which costs more so."""
        return 2.0 if problem.tokens == 1 else 1.0

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        """Outputs and memory; see `recurrences.chunked`."""
        from attn_variants.mechanisms.recurrence_scan import chunked

        return chunked(steps, before, chunk)


class PlainRecurrent(RecurrenceKernel):
    """Accepts every recurrence, and is the definition; it is how single tokens are decoded."""

    name = "plain_recurrent"
    summary = "linear recurrences token by token in torch; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in RecurrenceProblem.defaults()}

    def cost(self, problem: RecurrenceProblem) -> float:
        """The unit of all costs for one token, far more for others."""
        return 1.0 if problem.tokens == 1 else FAR

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- no chunks here
        """Outputs and memory; see `recurrences.recurrent`."""
        from attn_variants.mechanisms.recurrence_scan import recurrent

        return recurrent(steps, before)
