"""The declarations of the training kernels: linear layers, attention and what is between them, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.base import Anything, AtLeast, Condition, Kernel, OneOf
from attn_core.kernels.product import (
    FORMS,
    ActivationKernel,
    ActivationProblem,
    ProductKernel,
    ProductProblem,
    WholeAttentionKernel,
    WholeAttentionProblem,
)
from attn_core.kernels.rowwise import (
    GATE,
    RMS_NORM,
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

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import why_not

if TYPE_CHECKING:
    from attn_core.dropout import Dropout
    from torch import Tensor


class Compiled(Kernel[Any]):
    """Base class of kernels that are compiled where they are first asked for."""

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: Any) -> list[str]:  # noqa: ARG002 -- any problem
        """Why the kernels could not be compiled, which is tried here."""
        from attn_kernels_cpu.library import trouble

        reason = trouble()
        return [] if reason is None else [reason]


class CpuProduct(Compiled, ProductKernel):
    """Float32 linear layers for AMD CPUs, on which PyTorch's MKL uses AVX2 at best.

    The order of sums does not depend on the number of threads.
    """

    name = "cpu_product"
    summary = "float32 linear layers with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {"gradients": Anything()}

    def further_refusals(self, problem: ProductProblem) -> list[str]:
        """Refuse CPUs other than those of AMD, too, on which PyTorch is as fast."""
        if chip.vendor() != chip.AMD:
            return [f"device: used on {chip.AMD} CPUs only, on which it was measured to be faster than PyTorch"]
        return super().further_refusals(problem)

    def cost(self, problem: ProductProblem) -> float:  # noqa: ARG002 -- the same for every one
        """The time relative to PyTorch, measured for products of 768 to 2048 rows: on one core of a Zen 5 0.38 to 0.5
        with AVX-512, on one of a Zen 3, with AVX2, 0.98 to 1.07, and to 1.25 for gradients of weights."""
        from attn_kernels_cpu.library import loaded

        return 0.45 if loaded().isa.name in ("amx", "avx512") else 1.05

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `products.linear`."""
        from attn_kernels_cpu.products import linear

        return linear(rows, weight, bias)

    def product(self, left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor:
        """See `products.product` and `products.add_product`."""
        from attn_kernels_cpu.products import add_product, product

        return product(left, right) if to is None else add_product(to, left, right)


class CpuRoundedProduct(CpuProduct):
    """Linear layers in bfloat16, with operands rounded while they are packed; PyTorch would copy them first."""

    name = "cpu_rounded_product"
    summary = "linear layers multiplied in bfloat16 with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {**CpuProduct.accepts, "multiplied_in": OneOf("bfloat16")}

    def cost(self, problem: ProductProblem) -> float:  # noqa: ARG002 -- the same for every one
        """The time relative to PyTorch, measured on one core of a Zen 5, conversions included: 0.6 to 0.9 for layers of
        128 to 512, 1 for those of 768."""
        return 0.8

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `products.rounded_linear`."""
        from attn_kernels_cpu.products import rounded_linear

        return rounded_linear(rows, weight, bias)

    def product(self, left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor:
        """See `products.rounded_product`."""
        from attn_kernels_cpu.products import rounded_product

        found = rounded_product(left, right)
        return found if to is None else to.add_(found)


class CpuActivation(Compiled, ActivationKernel):
    """Activations in one pass over memory each way; the backward pass recomputes the activation."""

    name = "cpu_activation"
    summary = "SiLU and GELU in float32 with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {"form": OneOf(*FORMS), "gradients": Anything()}

    def cost(self, problem: ActivationProblem) -> float:
        """The time relative to PyTorch, forward and backward, on one core of a Zen 5 with AVX-512: GELU measured within
        steps of nanoGPT's recipe, which became 2 to 4 % shorter, the others alone."""
        return {"silu": 0.95, "gelu_tanh": 0.26}.get(problem.form, 0.8)

    def activated(self, rows: Tensor, form: Activation) -> Tensor:
        """See `products.activated`."""
        from attn_kernels_cpu.products import activated

        return activated(rows, form)


class CpuAttention(Compiled, WholeAttentionKernel):
    """Attention with the scores of 64 neighbouring queries at a time, which are recomputed for the gradients.

    It uses the products of `CpuProduct`, and is faster than PyTorch on the same CPUs.
    """

    name = "cpu_attention"
    summary = "float32 attention over whole sequences with its gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "causal": Anything(),
        "dropout": Anything(),
        "gradients": Anything(),
    }

    def further_refusals(self, problem: WholeAttentionProblem) -> list[str]:
        """As in `CpuProduct`, but with dropout accepted on every CPU: in PyTorch it takes many tensor operations."""
        if problem.dropout:
            return super().further_refusals(problem)
        return CpuProduct().further_refusals(ProductProblem())

    def cost(self, problem: WholeAttentionProblem) -> float:  # noqa: ARG002 -- the same for every one
        """The time relative to PyTorch, measured on one core of a Zen 5 with AVX-512 for 64 to 256 tokens: 0.3 to
        0.4."""
        return 0.4

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: Dropout | None = None
    ) -> Tensor:
        """See `attention.attention`."""
        from attn_kernels_cpu.attention import attention

        return attention(query, key, value, causal=causal, scale=scale, dropout=dropout)


_IN_TRAINING: Mapping[str, Condition] = {"gradients": Anything(), "training": OneOf(True)}  # noqa: FBT003
"""Gradients are computed, but cannot be differentiated again."""


class InOnePass(Compiled, RowKernel[Any]):
    """Base class of row-wise kernels, which read and write each row once, forward and backward."""

    def cost(self, problem: RowProblem) -> float:  # noqa: ARG002 -- rows are rows
        """The time relative to PyTorch, forward and backward, for rows that no cache holds."""
        return 0.5


class CpuNorm(InOnePass, NormKernel):
    """RMSNorm, optionally with the residual addition before it; PyTorch composes it of several operations."""

    name = "cpu_rms_norm"
    summary = "RMSNorm in float32, optionally fused with a residual addition, with its gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "form": OneOf(*ROW_FORMS[RMS_NORM]), "row_size": AtLeast(1), **_IN_TRAINING,
    }  # fmt: skip

    def norm(self, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor | None:
        """See `rowwise.norm`."""
        from attn_kernels_cpu.rowwise import norm

        return norm(rows, gain, eps)

    def norm_sum(self, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
        """See `rowwise.norm_sum`."""
        from attn_kernels_cpu.rowwise import norm_sum

        return norm_sum(rows, added, gain, eps)


class CpuGate(InOnePass, GateKernel):
    """Gated activations; only the gate and up inputs are saved for the gradients."""

    name = "cpu_gate"
    summary = "SwiGLU and GEGLU in float32 with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "form": OneOf(*ROW_FORMS[GATE]), "row_size": AtLeast(1), **_IN_TRAINING,
    }  # fmt: skip

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor | None:
        """See `rowwise.gated`."""
        from attn_kernels_cpu.rowwise import gated

        return gated(gate, up, activation)


class CpuRotary(InOnePass, RotaryKernel):
    """Rotary embedding of pairs in halves; the gradient is rotated by the negative angles."""

    name = "cpu_rotary"
    summary = "rotary embedding in float32 with its gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "form": OneOf("halves"), "row_size": AtLeast(1), **_IN_TRAINING,
    }  # fmt: skip

    def rotate(self, rows: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor | None:  # noqa: ARG002 -- halves
        """See `rowwise.rotate`."""
        from attn_kernels_cpu.rowwise import rotate

        return rotate(rows, cosines, sines)


class CpuCrossEntropy(InOnePass, CrossEntropyKernel):
    """Cross-entropy that reads and writes each row of logits while the cache holds it."""

    name = "cpu_cross_entropy"
    summary = "cross-entropy in float32 over large vocabularies, with gradients that overwrite the logits, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "row_size": AtLeast(1),
        **_IN_TRAINING,
    }

    def losses(self, logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor | None:
        """See `rowwise.losses`."""
        from attn_kernels_cpu.rowwise import losses

        return losses(logits, ids, targets, gradients=gradients)
