"""Linear layers, activations and attention in training: with gradients, and with weights that change every step.

Where no kernel accepts, the caller uses its tensor library, which is the definition.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import KernelTable
from attn_core.kernels.rowwise import Activation
from attn_core.plugins.catalog import installed

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


def product_kernel(
    rows: Tensor, weight: Tensor, bias: Tensor | None, multiplied_in: str = "float32"
) -> ProductKernel | None:
    """The kernel for a linear layer; None if no kernel is faster than the tensor library.

    `multiplied_in` as in `ProductProblem`. Not to be called while torch.compile traces.
    """
    table = product_table()
    if table is None or weight.dim() != 2 or rows.numel() * weight.shape[0] < SMALLEST_PRODUCT:
        return None
    parts = (rows, weight) if bias is None else (rows, weight, bias)
    if any(part.dtype != rows.dtype or part.device != rows.device for part in parts):
        return None
    gradients = any(part.requires_grad for part in parts)
    return table.find(rows.dtype, rows.device.type, gradients, multiplied_in, below=1)


@cache
def product_table() -> KernelTable[ProductKernel] | None:
    """The kernels of linear layers; None where none can run on this machine."""
    table = KernelTable(installed().kernels, ProductKernel, _problem)
    return table if any(kernel.available() is None for kernel in table.kernels) else None


def _problem(dtype: Any, device: str, gradients: bool, multiplied_in: str) -> ProductProblem:  # noqa: FBT001 -- part of a key
    kind = str(dtype).removeprefix("torch.")
    return ProductProblem(dtype=kind, device=device, gradients=gradients, multiplied_in=multiplied_in)


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
    table = activation_table()
    if table is None or rows.numel() < SMALLEST_ACTIVATION:
        return None
    return table.find(form, rows.dtype, rows.device.type, rows.requires_grad, below=1)


@cache
def activation_table() -> KernelTable[ActivationKernel] | None:
    """The kernels of activations; None where none can run on this machine."""
    table = KernelTable(installed().kernels, ActivationKernel, _activation)
    return table if any(kernel.available() is None for kernel in table.kernels) else None


def _activation(form: str, dtype: Any, device: str, gradients: bool) -> ActivationProblem:  # noqa: FBT001 -- part of a key
    kind = str(dtype).removeprefix("torch.")
    return ActivationProblem(form=form, dtype=kind, device=device, gradients=gradients)


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
    table = whole_attention_table()
    if table is None or any(rows.dim() != 4 or rows.dtype != query.dtype for rows in (query, key, value)):
        return None
    if not key.shape[1] or query.shape[1] % key.shape[1] or (causal and query.shape[2] != key.shape[2]):
        return None
    if query.numel() * key.shape[2] < SMALLEST_PRODUCT:
        return None
    gradients = query.requires_grad or key.requires_grad or value.requires_grad
    return table.find(causal, dropout, query.dtype, query.device.type, gradients, below=1)


@cache
def whole_attention_table() -> KernelTable[WholeAttentionKernel] | None:
    """The kernels of attention over whole sequences; None where none can run on this machine."""
    table = KernelTable(installed().kernels, WholeAttentionKernel, _attention)
    return table if any(kernel.available() is None for kernel in table.kernels) else None


def _attention(causal: bool, dropout: bool, dtype: Any, device: str, gradients: bool) -> WholeAttentionProblem:  # noqa: FBT001 -- parts of a key
    kind = str(dtype).removeprefix("torch.")
    return WholeAttentionProblem(causal=causal, dropout=dropout, dtype=kind, device=device, gradients=gradients)
