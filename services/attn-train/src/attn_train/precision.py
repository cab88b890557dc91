"""The precision of training, and the setup of a model's blocks: compilation and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Token
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.base import TRAINED_IN, needs_operations
from attn_core.kernels.product import (
    ProductKernel,
    activation_kernel,
    product_kernel,
    whole_attention_kernel,
)
from attn_core.kernels.rowwise import Activation
from attn_core.plugins.catalog import installed_operation
from attn_kernels_cpu.invariant import BatchInvariant
from attn_models.decoder.block import Block
from attn_models.decoder.mixture_of_experts import Router
from attn_models.encoder.encoder import EncoderBlock
from attn_models.encoder_decoder.transformer import DecoderBlock as TransformerDecoderBlock
from attn_models.encoder_decoder.transformer import EncoderBlock as TransformerEncoderBlock
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from attn_train.fused_linears import join_products
from attn_train.gpu_products import GpuProducts, HalfWeights

Precision = Callable[[], AbstractContextManager[object]]
"""Returns a context for forward passes in some precision."""

BLOCKS = (Block, EncoderBlock, TransformerEncoderBlock, TransformerDecoderBlock)
"""Modules that can be compiled, and whose activations can be checkpointed."""


def forward_precision(
    precision: str, device: torch.device, halves: HalfWeights | None = None, *, batch_invariant: bool = False
) -> AbstractContextManager[object]:
    """Return the context for the forward pass of an update in "float32" or "bfloat16".

    Weights, their gradients and the optimizer's moments are float32 in both. For float32 it is `Float32Products` on a
    CPU with kernels for it. For bfloat16 it is `torch.autocast` on a GPU, on those of NVIDIA and AMD with `GpuProducts`
    and the weights cast in `halves`, and `Bfloat16Products` on a CPU. With `batch_invariant` it is `BatchInvariant`;
    raises `InvalidValue` for others than float32 on a CPU.
    """
    if batch_invariant:
        if precision != "float32" or device.type != "cpu":
            given = f"true with precision {precision} on {device.type}"
            raise InvalidValue.of("config.on_policy.batch_invariant", given, "false, or precision float32 on a CPU")
        return BatchInvariant()
    if precision == "float32":
        return (
            nullcontext() if device.type != "cpu" or installed_operation(ProductKernel) is None else Float32Products()
        )
    if device.type == "cpu":
        return Bfloat16Products()
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    return autocast if device.type != "cuda" else both(autocast, GpuProducts(halves))


def half_weights(model: nn.Module, precision: str, device: torch.device) -> HalfWeights | None:
    """Return the bfloat16 weights for training on a CUDA device, and join the layers with the same input; else None."""
    if precision != "bfloat16" or device.type != "cuda":
        return None
    join_products(model)
    return HalfWeights(model)


@contextmanager
def both(*managers: AbstractContextManager[object]) -> Iterator[None]:
    """A context in which all of these contexts are entered."""
    with ExitStack() as entered:
        for manager in managers:
            entered.enter_context(manager)
        yield


def validation_precision(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which validation losses are computed: float32 on a CPU, else as in training."""
    return nullcontext() if device.type == "cpu" else forward_precision(precision, device)


class CpuTraining(TorchFunctionMode):
    """Base class of modes for training on a CPU with products `multiplied_in` a type: `TRAINED_IN` is set within."""

    multiplied_in: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._outer: list[Token[str | None]] = []

    def __enter__(self) -> Self:
        self._outer.append(TRAINED_IN.set(self.multiplied_in))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        TRAINED_IN.reset(self._outer.pop())


class Bfloat16Products(CpuTraining):
    """A mode in which float32 linear layers multiply in bfloat16, forward and backward (arXiv 1905.12322).

    Weights, gradients, attention, norms and losses stay in float32; activations and attention are computed as in
    `Float32Products`. `torch.autocast` would also run attention in bfloat16, which torch computes many times slower on
    a CPU.
    """

    multiplied_in = "bfloat16"

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the replacement of a function, if it has one; other functions are not changed."""
        functions = IN_TORCH if operations_are_observed() else OWN_IN_BFLOAT16
        own = functions.get(func)
        return (func if own is None else own)(*args, **(kwargs or {}))


class Float32Products(CpuTraining):
    """A mode in which float32 linear layers, activations and attention are computed by attn's own kernels if available.

    It has no effect while torch traces, or within a mode that observes torch's operations, such as a FLOP counter.
    """

    multiplied_in = "float32"

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the replacement of a function, if it has one; other functions are not changed."""
        own = None if operations_are_observed() else OWN.get(func)
        return (func if own is None else own)(*args, **(kwargs or {}))


def operations_are_observed() -> bool:
    """Whether torch traces, or a dispatch mode is active, such as a FLOP counter, that needs torch's own operations."""
    return torch.compiler.is_compiling() or needs_operations(_get_current_dispatch_mode())


PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Types of tensors with plain memory, which kernels can read; DTensors of torch.distributed are not."""


def float32_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
    """`torch.nn.functional.linear`, by a kernel if one is faster."""
    if type(input) in PLAIN_TENSORS and type(weight) in PLAIN_TENSORS:
        kernel = product_kernel(input, weight, bias)
        if kernel is not None:
            return kernel.linear(input, weight, bias)
    return functional.linear(input, weight, bias)


def bfloat16_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
    """`torch.nn.functional.linear` multiplied in bfloat16, by a kernel if one is faster; the result is float32."""
    if type(input) in PLAIN_TENSORS and type(weight) in PLAIN_TENSORS:
        kernel = product_kernel(input, weight, bias, "bfloat16")
        if kernel is not None:
            return kernel.linear(input, weight, bias)
    return bfloat16_linear_in_torch(input, weight, bias)


def bfloat16_linear_in_torch(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
    """`torch.nn.functional.linear` of float32 in bfloat16 with a float32 result; of other types, as torch does it."""
    if input.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return functional.linear(input, weight, bias)
    half = torch.bfloat16
    return functional.linear(input.to(half), weight.to(half), None if bias is None else bias.to(half)).float()


def float32_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:  # noqa: A002 - torch's names
    """`torch.nn.functional.gelu`, by a kernel if one is faster."""
    form = GELUS.get(approximate) if type(input) in PLAIN_TENSORS else None
    kernel = None if form is None else activation_kernel(input, form)
    if kernel is None or form is None:
        return functional.gelu(input, approximate=approximate)
    return kernel.activated(input, form)


def float32_silu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002, FBT001, FBT002 - torch's names
    """`torch.nn.functional.silu`, by a kernel if one is faster."""
    kernel = activation_kernel(input, "silu") if type(input) in PLAIN_TENSORS and not inplace else None
    return functional.silu(input, inplace) if kernel is None else kernel.activated(input, "silu")


def float32_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by a kernel if one is faster."""
    types = {type(rows) for rows in (query, key, value)}
    causal, scale = bool(given.get("is_causal")), given.get("scale")
    plain = attn_mask is None and not given.get("dropout_p") and types <= set(PLAIN_TENSORS)
    kernel = whole_attention_kernel(query, key, value, causal=causal) if plain else None
    if kernel is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **given)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return kernel.attention(query, key, value, causal=causal, scale=scale)


GELUS: Mapping[str, Activation] = {"none": "gelu", "tanh": "gelu_tanh"}
"""Names of the kernels' activations, by the `approximate` argument of torch's GELU."""

OWN: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
    functional.linear: float32_linear,
    functional.gelu: float32_gelu,
    functional.silu: float32_silu,
    functional.scaled_dot_product_attention: float32_attention,
}
"""Functions of torch, and their replacements within `Float32Products`."""

OWN_IN_BFLOAT16 = {**OWN, functional.linear: bfloat16_linear}
IN_TORCH: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {functional.linear: bfloat16_linear_in_torch}
"""Replacements within `Bfloat16Products`: normally, and while torch's operations are traced or observed."""


def set_up_blocks(model: nn.Module, config: TrainingConfig) -> None:
    """Enable compilation and activation checkpointing of a model's blocks, as the config says.

    Parameter names do not change. Raises `InvalidValue` if the model does not support an option; see `check_blocks`.
    """
    check_blocks(model, config)
    for block in blocks_of(model):
        if config.gradient_checkpointing:
            # `recomputed` has an effect only in training: evaluation has no gradients.
            device = next(block.parameters()).device
            numerics = config.on_policy.batch_invariant
            precision = partial(forward_precision, config.precision, device, batch_invariant=numerics)
            block.forward = partial(recomputed, block, precision, block.forward)
        if config.torch_compile:
            cast("nn.Module", block).compile()


def recomputed(block: nn.Module, precision: Precision, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward` of a block with activation checkpointing: the backward pass recomputes it (arXiv 1604.06174)."""
    if not torch.is_grad_enabled() or not block.training:
        return forward(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        # When torch recomputes, it restores autocast, but no other modes of the first forward pass.
        with precision():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def blocks_of(model: nn.Module) -> list[Any]:
    """Return the blocks of a model; blocks are never nested."""
    return [module for module in model.modules() if isinstance(module, BLOCKS)]


def check_blocks(model: nn.Module, config: TrainingConfig) -> None:
    """Raise `InvalidValue` for options of blocks if the model has no blocks or does not support an option."""
    for name in ("torch_compile", "gradient_checkpointing"):
        if getattr(config, name) and not blocks_of(model):
            raise InvalidValue.of(
                f"config.{name}", "true", f"false: {type(model).__name__} has no blocks that support it"
            )
    if config.gradient_checkpointing and any(isinstance(module, Router) for module in model.modules()):
        allowed = "false for models with experts, whose routers would count every token twice"
        raise InvalidValue.of("config.gradient_checkpointing", "true", allowed)
