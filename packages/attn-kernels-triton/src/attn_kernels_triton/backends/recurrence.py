"""The declarations of linear recurrences on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, AtMost, Condition, OneOf
from attn_core.kernels.recurrence import RecurrenceKernel, RecurrenceProblem, Steps

from attn_kernels_triton.backends.conditions import MAX_KEY_SIZE, MAX_KEY_SIZE_PER_CHANNEL, Computable, OnGpu
from attn_kernels_triton.in_graph import ChunksInGraph
from attn_kernels_triton.machine import absence, uncompilable

if TYPE_CHECKING:
    from torch import Tensor

ACCEPTS: Mapping[str, Condition] = {
    "decay": OneOf("none", "head", "channel"),
    "delta_rule": Anything(),
    "key_size": AtMost(MAX_KEY_SIZE),
    "value_size": Anything(),
    "query_heads": Anything(),
    "key_value_heads": Anything(),
    "dtype": Computable(OneOf("float32", "bfloat16")),
    "device": OnGpu(),
}


class OnRegisters(RecurrenceKernel):
    """Base class of recurrence kernels that keep the state of a head in registers."""

    mixes: ClassVar[bool] = True

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def unsupported(self, error: Exception) -> str | None:
        """Why Triton cannot compile or run a kernel on this GPU, if that is what the error means."""
        return uncompilable(error)

    def further_refusals(self, problem: RecurrenceProblem) -> list[str]:
        """Refuse large key sizes in float32 or with a decay per channel, for which half as many channels fit."""
        reasons = []
        if MAX_KEY_SIZE_PER_CHANNEL < problem.key_size <= MAX_KEY_SIZE:
            for field, value in (("dtype", "float32"), ("decay", "channel")):
                if getattr(problem, field) == value:
                    reasons.append(
                        f"{field}: {value!r} is supported for key_size up to {MAX_KEY_SIZE_PER_CHANNEL} only"
                    )
        return reasons


class TritonChunked(OnRegisters, ChunksInGraph):
    """The chunked form: tokens within a chunk interact by matrix products, and the state is passed between chunks."""

    name = "triton_chunked"
    summary = "linear recurrences by chunks on a GPU, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = {**ACCEPTS, "gradients": Anything()}

    def cost(self, problem: RecurrenceProblem) -> float:
        """An estimate: the plain computation launches dozens of kernels per call, each of which reads all operands."""
        return 0.5 if problem.tokens == 1 else 0.1


class TritonRecurrent(OnRegisters):
    """The recurrent form, token by token: the state is read and written once per call."""

    name = "triton_recurrent"
    summary = "decoding of linear recurrences on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = ACCEPTS

    def cost(self, problem: RecurrenceProblem) -> float:
        """An estimate: the plain computation reads or writes the state about four times."""
        return 0.2 if problem.tokens == 1 else 30.0

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- no chunks here
        """Outputs and the state after the last step, float32; see `recurrence.compute.by_token`."""
        from attn_kernels_triton.recurrence.compute import by_token

        found: tuple[Tensor, Tensor] = by_token(steps, before)
        return found
