"""The declarations of row-wise operations (norms, rotary embedding, gates, cross-entropy) on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.base import Anything, AtLeast, AtMost, Condition, OneOf
from attn_core.kernels.rowwise import (
    CROSS_ENTROPY,
    GATE,
    RMS_NORM,
    ROTARY,
    ROW_FORMS,
    Activation,
    CrossEntropyKernel,
    GateKernel,
    NormKernel,
    RotaryKernel,
    RowKernel,
    RowProblem,
    Targets,
)

from attn_kernels_triton.backends.conditions import MAX_NORM_ROW, Computable, OnGpu
from attn_kernels_triton.machine import absence, uncompilable

if TYPE_CHECKING:
    from attn_core.batch import RowsInPlace
    from torch import Tensor


def accepts(operation: str, row_size: Condition) -> Mapping[str, Condition]:
    """The accepted problems: all forms of an operation in all dtypes, with gradients, in training or not."""
    return {
        "row_size": row_size,
        "form": OneOf(*ROW_FORMS[operation]),
        "gradients": Anything(),
        "training": Anything(),
        "dtype": Computable(OneOf("float32", "bfloat16", "float16")),
        "device": OnGpu(),
    }


class InOnePass(RowKernel[Any]):
    """Base class of row-wise kernels, which read and write each row once."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def unsupported(self, error: Exception) -> str | None:
        """Why Triton cannot compile or run a kernel on this GPU, if that is what the error means."""
        return uncompilable(error)

    def cost(self, problem: RowProblem) -> float:  # noqa: ARG002 -- rows are rows
        """An estimate: the plain computation reads and writes the rows about three to six times."""
        return 0.3


class TritonRmsNorm(InOnePass, NormKernel):
    """RMSNorm, optionally with the residual addition before it, in one pass; all gradients in another pass."""

    name = "triton_rms_norm"
    summary = "RMSNorm, optionally fused with a residual addition, on a GPU, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = accepts(RMS_NORM, AtMost(MAX_NORM_ROW))

    def norm(self, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """See `rowwise.norm.rms_norm`."""
        from attn_kernels_triton.rowwise.norm import rms_norm

        out: Tensor = rms_norm(rows, gain, eps)
        return out

    def norm_sum(self, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """See `rowwise.norm.rms_norm_sum`."""
        from attn_kernels_triton.rowwise.norm import rms_norm_sum

        found: tuple[Tensor, Tensor] = rms_norm_sum(rows, added, gain, eps)
        return found


class TritonRotary(InOnePass, RotaryKernel):
    """Rotary embedding of pairs in halves or neighbouring elements, over all or part of a head.

    The gradient is rotated by the negative angles.
    """

    name = "triton_rotary"
    summary = "rotary embedding on a GPU, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = accepts(ROTARY, AtMost(1024))

    def rotate(self, rows: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor:
        """See `rowwise.rotary.rotate`."""
        from attn_kernels_triton.rowwise.rotary import rotate

        out: Tensor = rotate(rows, cosines, sines, interleaved=interleaved)
        return out

    def rotate_appended(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        kept: RowsInPlace,
        *,
        interleaved: bool,
    ) -> Tensor | None:
        """See `rowwise.append.rotate_appended`."""
        from attn_kernels_triton.rowwise.append import rotate_appended

        out: Tensor = rotate_appended(projected, turns, kept, interleaved=interleaved)
        return out


class TritonGate(InOnePass, GateKernel):
    """Gated activations, such as SwiGLU; only the gate and up inputs are saved for the gradients."""

    name = "triton_gate"
    summary = "SwiGLU and GEGLU on a GPU, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = accepts(GATE, AtLeast(1))

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """See `rowwise.gate.gated`."""
        from attn_kernels_triton.rowwise.gate import gated

        out: Tensor = gated(gate, up, activation)
        return out


class TritonCrossEntropy(InOnePass, CrossEntropyKernel):
    """Cross-entropy that reads logits twice, mostly from the L2 cache the second time, without a float32 copy."""

    name = "triton_cross_entropy"
    summary = "cross-entropy over large vocabularies on a GPU, with gradients that overwrite the logits"
    accepts: ClassVar[Mapping[str, Condition]] = accepts(CROSS_ENTROPY, AtLeast(1))

    def losses(self, logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor:
        """See `rowwise.cross_entropy.losses`."""
        from attn_kernels_triton.rowwise.cross_entropy import losses

        found: Tensor = losses(logits, ids, targets, gradients=gradients)
        return found
