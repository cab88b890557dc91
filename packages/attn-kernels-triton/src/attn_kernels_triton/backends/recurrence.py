"""Linear recurrences on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, AtMost, Condition, OneOf
from attn_core.kernels.recurrence import RecurrenceKernel, RecurrenceProblem, Steps

from attn_kernels_triton.backends.conditions import MAX_KEY_SIZE, MAX_KEY_SIZE_PER_CHANNEL, OnGpu
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
    "dtype": OneOf("float32", "bfloat16"),
    "device": OnGpu(),
}


class OnRegisters(RecurrenceKernel):
    """What both kernels have in common: a head's memory must fit into registers."""

    mixes: ClassVar[bool] = True

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def unsupported(self, error: Exception) -> str | None:
        """What Triton says where it cannot compile a program for this chip."""
        return uncompilable(error)

    def further_refusals(self, problem: RecurrenceProblem) -> list[str]:
        """In float32, or where channels fade apart, half as many channels fit."""
        reasons = []
        if MAX_KEY_SIZE_PER_CHANNEL < problem.key_size <= MAX_KEY_SIZE:
            for field, value in (("dtype", "float32"), ("decay", "channel")):
                if getattr(problem, field) == value:
                    reasons.append(f"{field}: {value!r} is for key_size up to {MAX_KEY_SIZE_PER_CHANNEL}")
        return reasons


class TritonChunked(OnRegisters, ChunksInGraph):
    """Tokens of a chunk meet pair by pair on the matrix unit; what is remembered goes from chunk to chunk."""

    name = "triton_chunked"
    summary = "linear recurrences by chunks on a GPU, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = {**ACCEPTS, "gradients": Anything()}

    def cost(self, problem: RecurrenceProblem) -> float:
        """An estimate: the plain computation runs some dozens of programs a call, each through all of memory."""
        return 0.5 if problem.tokens == 1 else 0.1


class TritonRecurrent(OnRegisters):
    """Reads and writes what is remembered once, and goes token by token in between."""

    name = "triton_recurrent"
    summary = "decoding of linear recurrences on a GPU"
    accepts: ClassVar[Mapping[str, Condition]] = ACCEPTS

    def cost(self, problem: RecurrenceProblem) -> float:
        """An estimate: the plain computation touches what is remembered some four times."""
        return 0.2 if problem.tokens == 1 else 30.0

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- no chunks here
        """Outputs and the memory after them, float32; see `recurrence.compute.by_token`."""
        from attn_kernels_triton.recurrence.compute import by_token

        found: tuple[Tensor, Tensor] = by_token(steps, before)
        return found
