"""Linear layers with float32 weights, computed in bfloat16 on a GPU with fewer casts than autocast makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from attn_core.first_order import first_order_only
from attn_models.losses import wide_product
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attn_train.fused_linears import can_join, joining, read_together

HALF = torch.bfloat16


class HalfWeights:
    """bfloat16 copies of the weights and biases of a model's linear layers, all cast by one operation.

    The copies of layers with the same input (`attn_core.joint.ReadsTogether`) are parts of one matrix. They are updated
    only by `refresh`, which must be called after the weights change and before the copies are used again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = list(
            {id(weight): weight for weight in _of_linear_layers(model) if weight.dtype is torch.float32}.values()
        )
        self._joint: dict[tuple[int, ...], Joint] = {}
        self._of: dict[int, Tensor] = {}
        own = {id(weight) for weight in self._kept}
        for module in read_together(model):
            layers = module.joint_layers()
            if can_join(layers):
                ids = {id(part) for layer in layers for part in layer.parameters(recurse=False)}
                if own.issuperset(ids) and self._of.keys().isdisjoint(ids):
                    self._join(layers)
        for weight in self._kept:
            if id(weight) not in self._of:
                self._of[id(weight)] = torch.empty_like(weight, dtype=HALF, requires_grad=False)
        self._halves = [self._of[id(weight)] for weight in self._kept]

    def _join(self, layers: Sequence[nn.Linear]) -> None:
        """Allocate one matrix and one bias vector whose parts are the copies of these layers."""
        sizes = [layer.out_features for layer in layers]
        weights, biases = [layer.weight for layer in layers], biases_of(layers)
        joint = Joint(sizes, side_by_side(weights, sizes), side_by_side(biases, sizes) if biases else None)
        self._joint[tuple(map(id, weights))] = joint
        for parts, whole in ((weights, joint.weight), (biases, joint.bias)):
            if whole is not None:
                self._of |= {id(part): half for part, half in zip(parts, whole.split_with_sizes(sizes), strict=True)}

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the current weights."""
        if self._kept:
            torch._foreach_copy_(self._halves, self._kept)

    def joint_of(self, layers: Sequence[nn.Linear]) -> Joint | None:
        """Return the joint weights of several layers; None if they are not parts of one matrix."""
        return self._joint.get(tuple(id(layer.weight) for layer in layers))

    def of(self, weight: Tensor) -> Tensor:
        """Return a weight or bias in bfloat16: the stored copy, or a new cast of a tensor that is not the model's."""
        found = self._of.get(id(weight))
        return weight.detach().to(HALF) if found is None else found


class Joint(NamedTuple):
    """Several linear layers in bfloat16: the output size of each, their weights [sum of sizes, width], and biases."""

    sizes: list[int]
    weight: Tensor
    bias: Tensor | None


def biases_of(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Return the biases of layers, which all have one or none."""
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    return [bias for bias in biases if bias is not None]


def side_by_side(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Allocate a bfloat16 tensor for the concatenation of parts [size, ...]."""
    return parts[0].detach().new_empty((sum(sizes), *parts[0].shape[1:]), dtype=HALF)


def _of_linear_layers(model: nn.Module) -> Iterable[Tensor]:
    """Yield the weights and biases of `nn.Linear` layers, except DTensors of torch.distributed."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield from (part for part in module.parameters(recurse=False) if not isinstance(part, DTensor))


class GpuProducts(TorchFunctionMode):
    """A mode in which linear layers under autocast are computed in bfloat16 with fewer casts than by autocast itself.

    Weights are cast once per update (`HalfWeights`), inputs once for consecutive layers with the same input, and weight
    gradients are accumulated and returned in float32 without rounding to bfloat16. Has no effect in compiled graphs,
    where torch.compile fuses the casts of autocast.
    """

    def __init__(self, halves: HalfWeights | None = None) -> None:
        super().__init__()
        self._halves = halves
        self._joining: list[AbstractContextManager[None]] = []
        self._last: tuple[Tensor, int, Tensor] | None = None
        """The input that was cast last, its version counter at that time, and the cast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `linear` for `torch.nn.functional.linear`; other functions are not changed."""
        if func is functional.linear and not torch.compiler.is_compiling():
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> GpuProducts:
        """Enter the mode, in which layers with the same input are also joined."""
        self._joining.append(joining(self.joined))
        self._joining[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the mode and release the last input."""
        self._last = None
        self._joining.pop().__exit__(None, None, None)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
        """`torch.nn.functional.linear` in bfloat16: input [..., width] and weight [outputs, width] to [..., outputs].

        Falls back to torch's function if autocast is off or uses another type, or if the weights are not float32.
        """
        if not _in_bfloat16(input, weight, bias):
            return functional.linear(input, weight, bias)
        halves = None if bias is None else self._half(bias)
        out: Tensor = HalfLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, (self._cast(input), self._half(weight), halves)
        )
        return out

    def joined(self, rows: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor] | None:
        """Compute layers with the same input by one product, as are their gradients; returns a list of [..., outputs].

        None if their weights are not one matrix in `HalfWeights`, or where `linear` falls back to torch.
        """
        joint = None if self._halves is None else self._halves.joint_of(layers)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if joint is None or not all(map(_in_bfloat16, [rows] * len(layers), weights, biases)):
            return None
        learned = weights if joint.bias is None else [*weights, *biases]
        out: Tensor = JointHalfLinear.apply(rows, self._cast(rows), joint, *learned)  # type: ignore[no-untyped-call]
        return list(out.split_with_sizes(joint.sizes, dim=-1))

    def _half(self, weight: Tensor) -> Tensor:
        return weight.detach().to(HALF) if self._halves is None else self._halves.of(weight)

    def _cast(self, rows: Tensor) -> Tensor:
        """Cast an input to bfloat16; the last cast is reused for the same unmodified tensor."""
        if rows.dtype is HALF:
            return rows.detach()
        if rows.is_inference():
            return rows.to(HALF)  # inference tensors have no version counter
        last = self._last
        if last is None or last[0] is not rows or last[1] != rows._version:  # noqa: SLF001 -- torch has no public name
            self._last = last = rows, rows._version, rows.detach().to(HALF)  # noqa: SLF001
        return last[2]


def _in_bfloat16(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would compute this product in bfloat16 on a GPU, and no tensor is a DTensor."""
    kind = rows.device.type
    if kind != "cuda" or not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not HALF:
        return False
    given = (weight,) if bias is None else (weight, bias)
    if any(part.dtype is not torch.float32 for part in given) or rows.dtype not in {torch.float32, HALF}:
        return False
    return not any(isinstance(part, DTensor) for part in (rows, *given))


class HalfLinear(torch.autograd.Function):
    """A linear layer in bfloat16; gets the input, weight and bias (or None), and the bfloat16 casts of the three."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, halves: tuple[Tensor, Tensor, Tensor | None]
    ) -> Tensor:
        """Multiply the bfloat16 tensors."""
        half_rows, half_weight, half_bias = halves
        flat = half_rows.reshape(-1, half_rows.shape[-1])
        out = flat @ half_weight.T if half_bias is None else torch.addmm(half_bias, flat, half_weight.T)
        ctx.save_for_backward(flat, half_weight)
        ctx.shape, ctx.types = rows.shape, (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return out.view(*rows.shape[:-1], weight.shape[0])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the types of input, weight and bias; each product or sum is rounded only once."""
        flat, half_weight = ctx.saved_tensors
        to_rows, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_rows, of_weight, of_bias = ctx.types
        change = change.reshape(-1, change.shape[-1])
        return (
            wide_product(change, half_weight, of_rows).view(ctx.shape) if to_rows else None,
            wide_product(change.T, flat, of_weight) if to_weight else None,
            change.sum(0, dtype=of_bias) if to_bias else None,
            None,
        )


class JointHalfLinear(torch.autograd.Function):
    """Joined linear layers in bfloat16; gets the input, its cast, a `Joint`, and the layers' weights and biases."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, half_rows: Tensor, joint: Joint, *learned: Tensor) -> Tensor:
        """Multiply the bfloat16 tensors; `learned`, the float32 weights and biases, are passed for their gradients."""
        flat = half_rows.reshape(-1, half_rows.shape[-1])
        out = flat @ joint.weight.T if joint.bias is None else torch.addmm(joint.bias, flat, joint.weight.T)
        ctx.save_for_backward(flat, joint.weight)
        ctx.shape, ctx.sizes, ctx.types = rows.shape, joint.sizes, (rows.dtype, learned[0].dtype)
        return out.view(*rows.shape[:-1], joint.weight.shape[0])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in the types of input and weights; each product or sum is rounded only once."""
        flat, half_weight = ctx.saved_tensors
        of_rows, of_weight = ctx.types
        change = change.reshape(-1, change.shape[-1])
        to_rows = wide_product(change, half_weight, of_rows).view(ctx.shape) if ctx.needs_input_grad[0] else None
        learned: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        if any(ctx.needs_input_grad[3:]):
            parts = list(wide_product(change.T, flat, of_weight).split_with_sizes(ctx.sizes))
            if len(learned) > len(parts):
                parts += change.sum(0, dtype=of_weight).split_with_sizes(ctx.sizes)
            learned = list(parts)
        return to_rows, None, None, *learned
