"""Which kernel or module computes a layer, as its mechanism says before any layer is built."""

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
    """A call of a layer with whole sequences of `tokens` tokens, 0 where they are not known.

    `gradients` are wanted or not; `padded` sequences have different lengths, `varlen` ones lie end to end, each with
    several texts; `dropout` says that weights are dropped.
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

    `part` names it. `asked` is what a kernel is given as data, None where the mechanism's own module computes it. A
    module that can do without takes a kernel only where one costs less than `below`, which is what it costs itself. Of
    a step over rows where a cache keeps them, `rows` are the forms of rows that are met there; see `paged_problem`.
    """

    part: str = "attention"
    asked: AttentionSpec | SelectedBlocksSpec | RecurrenceSpec | RecurrentStepSpec | None = None
    below: float = math.inf
    rows: tuple[str, ...] = ()

    def problem(self, call: WholeCall) -> Problem:
        """The problem that kernels are asked; raises `InvalidValue` where none is."""
        if self.asked is None:
            raise InvalidValue.of("asked", None, "a spec: the mechanism's own module computes this part")
        if isinstance(self.asked, RecurrenceSpec):
            # No recurrence is computed in float16, whose range its memories leave.
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
