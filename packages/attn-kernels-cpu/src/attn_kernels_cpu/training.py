"""The declarations of the training kernels: linear layers, activations and attention in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, Condition, OneOf
from attn_core.kernels.product import (
    FORMS,
    ActivationKernel,
    ActivationProblem,
    ProductKernel,
    ProductProblem,
    WholeAttentionKernel,
    WholeAttentionProblem,
)
from attn_core.kernels.rowwise import Activation

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import why_not

if TYPE_CHECKING:
    from attn_core.dropout import Dropout
    from torch import Tensor


class CpuProduct(ProductKernel):
    """Float32 linear layers for AMD CPUs, on which PyTorch's MKL uses AVX2 at best.

    The order of sums does not depend on the number of threads.
    """

    name = "cpu_product"
    summary = "float32 linear layers with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {"gradients": Anything()}

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: ProductProblem) -> list[str]:  # noqa: ARG002 -- any problem
        """Refuse CPUs other than those of AMD, on which PyTorch is as fast, and all if the kernels cannot be compiled,
        which is tried here."""
        if chip.vendor() != chip.AMD:
            return [f"device: used on {chip.AMD} CPUs only, on which it was measured to be faster than PyTorch"]
        from attn_kernels_cpu.library import trouble

        reason = trouble()
        return [] if reason is None else [reason]

    def cost(self, problem: ProductProblem) -> float:  # noqa: ARG002 -- the same for every one
        """The time relative to PyTorch, measured on one core of a Zen 5 for products of 768 to 2048 rows: 0.38 to 0.5
        with AVX-512, 0.75 to 0.85 with AVX2."""
        from attn_kernels_cpu.library import loaded

        return 0.45 if loaded().isa.name in ("amx", "avx512") else 0.8

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `products.linear`."""
        from attn_kernels_cpu.products import linear

        return linear(rows, weight, bias)


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


class CpuActivation(ActivationKernel):
    """Activations in one pass over memory each way; the backward pass recomputes the activation."""

    name = "cpu_activation"
    summary = "SiLU and GELU in float32 with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {"form": OneOf(*FORMS), "gradients": Anything()}

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: ActivationProblem) -> list[str]:  # noqa: ARG002 -- any problem
        """Why the kernels could not be compiled, which is tried here."""
        from attn_kernels_cpu.library import trouble

        reason = trouble()
        return [] if reason is None else [reason]

    def cost(self, problem: ActivationProblem) -> float:
        """The time relative to PyTorch, forward and backward, on one core of a Zen 5 with AVX-512: GELU measured within
        steps of nanoGPT's recipe, which became 2 to 4 % shorter, the others alone."""
        return {"silu": 0.95, "gelu_tanh": 0.26}.get(problem.form, 0.8)

    def activated(self, rows: Tensor, form: Activation) -> Tensor:
        """See `products.activated`."""
        from attn_kernels_cpu.products import activated

        return activated(rows, form)


class CpuAttention(WholeAttentionKernel):
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

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: WholeAttentionProblem) -> list[str]:
        """As in `CpuProduct`, but with dropout accepted on every CPU: in PyTorch it takes many tensor operations."""
        if problem.dropout:
            from attn_kernels_cpu.library import trouble

            reason = trouble()
            return [] if reason is None else [reason]
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
