"""Linear layers, activations and attention in training: with gradients, and with weights that change every step.

Where no kernel accepts, the caller uses its tensor library, which is the definition.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.rowwise import Activation
from attn_core.plugins.catalog import installed_operation

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.dropout import Dropout

SMALLEST_PRODUCT = 1 << 20
"""Number of multiplications of a product below which calling a kernel costs more than it saves."""


SMALLEST_ACTIVATION = 1 << 14
"""Number of elements of an activation below which calling a kernel costs more than it saves."""

FORMS: tuple[Activation, ...] = get_args(Activation)
"""Activations by name: x σ(x), GELU, and GELU by tanh."""


@dataclass(frozen=True, kw_only=True)
class ProductProblem(Problem):
    """A linear layer of at least `SMALLEST_PRODUCT` multiplications. `gradients` says that gradients are needed.

    `multiplied_in` is the element type to which operands are rounded before they are multiplied, in the backward pass,
    too; sums, results and gradients have the type `dtype`.
    """

    operation: ClassVar[str] = "product"

    multiplied_in: str = "float32"
    gradients: bool = False


class ProductKernel(Kernel[ProductProblem]):
    """Computes linear layers in training."""

    problem: ClassVar[type[Problem]] = ProductProblem

    @abstractmethod
    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear`: rows [..., inputs] to [..., outputs] by weight [outputs, inputs] and bias
        [outputs], with gradients to all three."""

    @abstractmethod
    def product(self, left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor:
        """The product of `left` [rows, depth] and `right` [depth, columns], without gradients; added to the contiguous
        `to` [rows, columns] in place, if it is given."""


def product_kernel(
    rows: Tensor, weight: Tensor, bias: Tensor | None, multiplied_in: str = "float32"
) -> ProductKernel | None:
    """The kernel for a linear layer; None if no kernel is faster than the tensor library.

    `multiplied_in` as in `ProductProblem`. Not to be called while torch.compile traces.
    """
    operation = installed_operation(ProductKernel)
    if operation is None or weight.dim() != 2 or rows.numel() * weight.shape[0] < SMALLEST_PRODUCT:
        return None
    parts = (rows, weight) if bias is None else (rows, weight, bias)
    if any(part.dtype != rows.dtype or part.device != rows.device for part in parts):
        return None
    gradients = any(part.requires_grad for part in parts)
    kind = {"dtype": rows.dtype, "device": rows.device.type}
    found: ProductKernel | None = operation.find(below=1, gradients=gradients, multiplied_in=multiplied_in, **kind)
    return found


@dataclass(frozen=True, kw_only=True)
class ActivationProblem(Problem):
    """An activation of at least `SMALLEST_ACTIVATION` elements. `gradients` says that gradients are needed."""

    operation: ClassVar[str] = "activation"

    form: str = "silu"
    gradients: bool = False


class ActivationKernel(Kernel[ActivationProblem]):
    """Computes activations in training."""

    problem: ClassVar[type[Problem]] = ActivationProblem

    @abstractmethod
    def activated(self, rows: Tensor, form: Activation) -> Tensor:
        """f(x) of each element (arXiv 1606.08415 for GELU), with gradients, in the shape and type of `rows`."""


def activation_kernel(rows: Tensor, form: Activation) -> ActivationKernel | None:
    """The kernel for an activation, or None, as for `product_kernel`."""
    operation = installed_operation(ActivationKernel)
    if operation is None or rows.numel() < SMALLEST_ACTIVATION:
        return None
    kind = {"dtype": rows.dtype, "device": rows.device.type}
    found: ActivationKernel | None = operation.find(below=1, form=form, gradients=rows.requires_grad, **kind)
    return found


@dataclass(frozen=True, kw_only=True)
class WholeAttentionProblem(Problem):
    """Full or causal softmax attention over whole sequences, of at least `SMALLEST_PRODUCT` multiplications per
    product. `dropout` says that weights are dropped at random, `gradients` that gradients are needed.
    """

    operation: ClassVar[str] = "whole_attention"

    causal: bool = False
    dropout: bool = False
    gradients: bool = False


class WholeAttentionKernel(Kernel[WholeAttentionProblem]):
    """Computes softmax attention over whole sequences in training."""

    problem: ClassVar[type[Problem]] = WholeAttentionProblem

    @abstractmethod
    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: Dropout | None = None
    ) -> Tensor:
        """softmax(scale q k^T) v, [batch, heads, queries, value_size], with gradients.

        `query` [batch, heads, queries, key_size]; `key` and `value` [batch, shared, keys, size], where the number of
        `shared` heads divides that of `heads`. With `causal`, queries are aligned to the end of the keys and see no
        later keys. `dropout` determines which weights become zero.
        """


def whole_attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, dropout: bool = False
) -> WholeAttentionKernel | None:
    """The kernel for attention over whole sequences, or None, as for `product_kernel` and for unsuitable inputs."""
    operation = installed_operation(WholeAttentionKernel)
    if operation is None or any(rows.dim() != 4 or rows.dtype != query.dtype for rows in (query, key, value)):
        return None
    if not key.shape[1] or query.shape[1] % key.shape[1] or (causal and query.shape[2] != key.shape[2]):
        return None
    if query.numel() * key.shape[2] < SMALLEST_PRODUCT:
        return None
    gradients = query.requires_grad or key.requires_grad or value.requires_grad
    kind = {"dtype": query.dtype, "device": query.device.type}
    found: WholeAttentionKernel | None = operation.find(
        below=1, causal=causal, dropout=dropout, gradients=gradients, **kind
    )
    return found
