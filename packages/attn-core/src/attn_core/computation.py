"""What computes a layer, kernels or its own module: described by its mechanism before any layer is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.base import Problem
from attn_core.kernels.recurrence import RecurrenceSpec, recurrence_problem
from attn_core.kernels.recurrent_step import RecurrentStepSpec, recurrent_step_problem
from attn_core.kernels.selected import SelectedBlocksSpec, selected_blocks_problem
from attn_core.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class WholeCall:
    """A call of a layer with whole sequences of `tokens` tokens, 0 where their number is not known.

    `gradients` says that gradients are needed, `padded` that sequences have different lengths, `varlen` that each row
    holds several concatenated documents, `dropout` that attention weights are dropped.
    """

    dtype: str
    device: str = "cpu"
    gradients: bool = False
    padded: bool = False
    varlen: bool = False
    dropout: bool = False
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Computation:
    """One part of what a layer computes between its projections.

    `part` is its name. `asked` is the spec that a kernel computes, None where the mechanism's own module computes it. A
    module with a computation of its own uses a kernel only if that costs less than `below`, the cost of its own. For
    a step that reads a cache in place, `rows` are the forms of cached rows that it supports; see `paged_problem`.
    """

    part: str = "attention"
    asked: AttentionSpec | SelectedBlocksSpec | RecurrenceSpec | RecurrentStepSpec | None = None
    below: float = math.inf
    rows: tuple[str, ...] = ()

    def problem(self, call: WholeCall) -> Problem:
        """The problem to choose a kernel for; raises `InvalidValue` where no kernel computes this part."""
        if self.asked is None:
            raise InvalidValue.of("asked", None, "a spec (the mechanism's own module computes this part, not a kernel)")
        if isinstance(self.asked, RecurrenceSpec):
            # Recurrences are not computed in float16: their memories would exceed its range.
            dtype = "float32" if call.dtype == "float16" else call.dtype
            return recurrence_problem(
                self.asked, dtype=dtype, device=call.device, gradients=call.gradients, tokens=call.tokens
            )
        if isinstance(self.asked, RecurrentStepSpec):
            return recurrent_step_problem(self.asked, dtype=call.dtype, device=call.device, gradients=call.gradients)
        if isinstance(self.asked, SelectedBlocksSpec):
            return selected_blocks_problem(
                self.asked, dtype=call.dtype, device=call.device, gradients=call.gradients, padded=call.padded
            )
        return attend_problem(
            self.asked,
            dtype=call.dtype,
            device=call.device,
            gradients=call.gradients,
            padded=call.padded,
            varlen=call.varlen,
            dropout=call.dropout,
            queries=call.tokens,
            keys=call.tokens,
        )
