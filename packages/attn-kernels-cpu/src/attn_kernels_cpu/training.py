"""The kernels of training, as dispatch sees them."""

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
    """Float32 products where torch's are those of MKL, which takes AVX2 at best where the chip is not Intel's.

    Sums are taken in one order whatever the number of threads.
    """

    name = "cpu_product"
    summary = "float32 linear layers with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {"gradients": Anything()}

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: ProductProblem) -> list[str]:  # noqa: ARG002 -- any problem
        """That torch is as fast on this chip, or why the kernels could not be compiled, which is tried here."""
        if chip.vendor() != chip.AMD:
            return [f"device: measured to be faster than torch on chips of {chip.AMD} alone"]
        from attn_kernels_cpu.library import trouble

        reason = trouble()
        return [] if reason is None else [reason]

    def cost(self, problem: ProductProblem) -> float:  # noqa: ARG002 -- the same for every one
        """Measured on one core of a Zen 5, of products of 768 to 2048 rows: 0.38 to 0.5 of torch's time with AVX-512,
        0.75 to 0.85 with AVX2."""
        from attn_kernels_cpu.library import loaded

        return 0.45 if loaded().isa.name in ("amx", "avx512") else 0.8

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `products.linear`."""
        from attn_kernels_cpu.products import linear

        return linear(rows, weight, bias)


class CpuRoundedProduct(CpuProduct):
    """Products of operands rounded to bfloat16 as they are packed, where torch would copy them first, in bfloat16."""

    name = "cpu_rounded_product"
    summary = "linear layers multiplied in bfloat16 with their gradients, in C++"
    accepts: ClassVar[Mapping[str, Condition]] = {**CpuProduct.accepts, "multiplied_in": OneOf("bfloat16")}

    def cost(self, problem: ProductProblem) -> float:  # noqa: ARG002 -- the same for every one
        """Measured on one core of a Zen 5, conversions included: 0.6 to 0.9 of torch's time for layers of 128 to 512,
        the same time for those of 768."""
        return 0.8

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `products.rounded_linear`."""
        from attn_kernels_cpu.products import rounded_linear

        return rounded_linear(rows, weight, bias)


class CpuActivation(ActivationKernel):
    """Passes through memory once each way, and computes the activation again for the gradients."""

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
        """Measured on one core of a Zen 5 with AVX-512, both ways: GELU within steps of nanoGPT's recipe, which became
        2 to 4 % shorter, the others alone."""
        return {"silu": 0.95, "gelu_tanh": 0.26}.get(problem.form, 0.8)

    def activated(self, rows: Tensor, form: Activation) -> Tensor:
        """See `products.activated`."""
        from attn_kernels_cpu.products import activated

        return activated(rows, form)


class CpuAttention(WholeAttentionKernel):
    """Scores of 64 neighbouring queries at a time, computed again for the gradients; products are those of
    `CpuProduct`, and so are the chips on which it is faster than torch.
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
        """As of `CpuProduct`; with dropout, which torch computes word by word in tensors, on every chip."""
        if problem.dropout:
            from attn_kernels_cpu.library import trouble

            reason = trouble()
            return [] if reason is None else [reason]
        return CpuProduct().further_refusals(ProductProblem())

    def cost(self, problem: WholeAttentionProblem) -> float:  # noqa: ARG002 -- the same for every one
        """Measured on one core of a Zen 5, of 64 to 256 tokens: 0.3 to 0.4 of torch's time with AVX-512."""
        return 0.4

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: Dropout | None = None
    ) -> Tensor:
        """See `attention.attention`."""
        from attn_kernels_cpu.attention import attention

        return attention(query, key, value, causal=causal, scale=scale, dropout=dropout)
