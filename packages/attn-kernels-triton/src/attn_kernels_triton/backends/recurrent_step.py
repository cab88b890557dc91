"""The declaration of fused decode steps of linear recurrences on a GPU, with states updated in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, AtMost, Condition, OneOf
from attn_core.kernels.recurrent_step import RecurrentStepInputs, RecurrentStepKernel, RecurrentStepProblem

from attn_kernels_triton.backends.conditions import MAX_KEY_SIZE, MAX_NORM_ROW, Computable, OnGpu
from attn_kernels_triton.machine import absence, uncompilable

if TYPE_CHECKING:
    from torch import Tensor

MAX_TAPS = 8
"""The largest number of taps of a short convolution: a program reads each tap by a separate load."""


class TritonRecurrentStep(RecurrentStepKernel):
    """Everything between the input projections and the output projection of a layer in one to three kernels."""

    name = "triton_recurrent_step"
    summary = "decode steps of linear recurrences on a GPU, with states updated in place"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "num_heads": Anything(),
        "num_key_heads": Anything(),
        "key_size": AtMost(MAX_KEY_SIZE),
        "value_size": AtMost(MAX_NORM_ROW),
        "taps": AtMost(MAX_TAPS),
        "feature_map": OneOf("none", "silu", "elu_plus_one"),
        "rotary": OneOf("none", "halves", "pairs"),
        "unit": Anything(),
        "decay": OneOf("none", "head", "channel"),
        "decay_form": OneOf("log", "log_sigmoid", "softplus"),
        "step_size": Anything(),
        "delta_rule": Anything(),
        "normalizer": Anything(),
        "skip": Anything(),
        "norm_heads": Anything(),
        "gate": OneOf("none", "silu", "sigmoid"),
        "norm_before_gate": Anything(),
        "dtype": Computable(OneOf("float32", "bfloat16", "float16")),
        "device": OnGpu(),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def unsupported(self, error: Exception) -> str | None:
        """Why Triton cannot compile or run a kernel on this GPU, if that is what the error means."""
        return uncompilable(error)

    def further_refusals(self, problem: RecurrentStepProblem) -> list[str]:
        """Refuse combinations of stages that the kernels do not support, and rows that are too long for the norm."""
        reasons = []
        if problem.rotary != "none" and (problem.taps or problem.feature_map != "none"):
            reasons.append("rotary: cannot follow a convolution or a feature map")
        if problem.step_size and problem.decay != "head":
            reasons.append(f"step_size: requires one decay per head, given is {problem.decay!r}")
        if problem.normalizer:
            used = {"delta_rule": problem.delta_rule, "skip": problem.skip, "norm_heads": problem.norm_heads > 1}
            reasons += [f"normalizer: cannot be combined with {name}" for name, present in used.items() if present]
        row = problem.norm_heads * problem.value_size
        if row > MAX_NORM_ROW:
            reasons.append(f"norm_heads: {row} elements normalized together are more than {MAX_NORM_ROW}")
        return reasons

    def cost(self, problem: RecurrentStepProblem) -> float:  # noqa: ARG002 -- the same for all
        """An estimate: the layer's own computation launches about twenty more kernels and copies states twice."""
        return 0.1

    def run(self, inputs: RecurrentStepInputs) -> Tensor:
        """See `RecurrentStepKernel.run`."""
        from attn_kernels_triton.recurrence.step import run_step

        found: Tensor = run_step(inputs)
        return found
