"""Linear layers of float32 weights on a GPU, multiplied in bfloat16 with few casts, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from attn_models.losses import wide_product
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attn_train.joint import can_join, joining, read_together

HALF = torch.bfloat16


class HalfWeights:
    """The weights and biases of a model's linear layers in bfloat16, cast together by one operation.

    Those of layers that read the same rows (`attn_core.joint.ReadsTogether`) lie side by side, as one matrix.
    They are those of the last `refresh`: whoever changes the weights calls it before they are read again.
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
        """Make one matrix, and one vector of biases, of which those of these layers are parts."""
        sizes = [layer.out_features for layer in layers]
        weights, biases = [layer.weight for layer in layers], biases_of(layers)
        joint = Joint(sizes, side_by_side(weights, sizes), side_by_side(biases, sizes) if biases else None)
        self._joint[tuple(map(id, weights))] = joint
        for parts, whole in ((weights, joint.weight), (biases, joint.bias)):
            if whole is not None:
                self._of |= {id(part): half for part, half in zip(parts, whole.split_with_sizes(sizes), strict=True)}

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights as they are now."""
        if self._kept:
            torch._foreach_copy_(self._halves, self._kept)

    def joint_of(self, layers: Sequence[nn.Linear]) -> Joint | None:
        """What several layers are together; None where they do not lie side by side."""
        return self._joint.get(tuple(id(layer.weight) for layer in layers))

    def of(self, weight: Tensor) -> Tensor:
        """A weight or bias in bfloat16: what was cast before, or a new cast of one that is not of the model."""
        found = self._of.get(id(weight))
        return weight.detach().to(HALF) if found is None else found


class Joint(NamedTuple):
    """Several layers in bfloat16: the outputs of each, their weights [sum of outputs, width], and biases, if any."""

    sizes: list[int]
    weight: Tensor
    bias: Tensor | None


def biases_of(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """The biases of layers, which have some or none."""
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    return [bias for bias in biases if bias is not None]


def side_by_side(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Memory in bfloat16 for parts [size, ...] one after the other."""
    return parts[0].detach().new_empty((sum(sizes), *parts[0].shape[1:]), dtype=HALF)


def _of_linear_layers(model: nn.Module) -> Iterable[Tensor]:
    """The weights and biases of `nn.Linear`; not those of torch.distributed, which lie in memory in other ways."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield from (part for part in module.parameters(recurse=False) if not isinstance(part, DTensor))


class GpuProducts(TorchFunctionMode):
    """Within it and autocast, linear layers multiply in bfloat16, as autocast has them; what it saves are casts.

    Weights are cast once an update (`HalfWeights`), rows once for all layers that read them next to each other, and
    gradients are summed and given in float32, never rounded to bfloat16 in between. Where torch compiles, it fuses
    casts itself, and sees autocast alone.
    """

    def __init__(self, halves: HalfWeights | None = None) -> None:
        super().__init__()
        self._halves = halves
        self._joining: list[AbstractContextManager[None]] = []
        self._last: tuple[Tensor, int, Tensor] | None = None
        """The rows that were cast last, their version then, and the cast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Other functions than linear layers are left as they are."""
        if func is functional.linear and not torch.compiler.is_compiling():
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> GpuProducts:
        """Have layers joined, too."""
        self._joining.append(joining(self.joined))
        self._joining[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep no rows."""
        self._last = None
        self._joining.pop().__exit__(None, None, None)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
        """`torch.nn.functional.linear`: [..., width] under weights [outputs, width] to [..., outputs] in bfloat16.

        Where autocast is off or asks for another type, and for weights that are not float32, torch's.
        """
        if not _in_bfloat16(input, weight, bias):
            return functional.linear(input, weight, bias)
        halves = None if bias is None else self._half(bias)
        out: Tensor = HalfLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, (self._cast(input), self._half(weight), halves)
        )
        return out

    def joined(self, rows: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor] | None:
        """The outputs [..., outputs] of layers as parts of one product, whose gradients are from one product each;
        None where they do not lie side by side in `HalfWeights`, and where torch multiplies."""
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
        """Rows in bfloat16; the same tensor, if it was not changed in between, is cast once."""
        if rows.dtype is HALF:
            return rows.detach()
        if rows.is_inference():
            return rows.to(HALF)  # its changes are not counted
        last = self._last
        if last is None or last[0] is not rows or last[1] != rows._version:  # noqa: SLF001 -- torch has no public name
            self._last = last = rows, rows._version, rows.detach().to(HALF)  # noqa: SLF001
        return last[2]


def _in_bfloat16(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would multiply these in bfloat16 on a GPU, and all lie in memory as they say."""
    kind = rows.device.type
    if kind != "cuda" or not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not HALF:
        return False
    given = (weight,) if bias is None else (weight, bias)
    if any(part.dtype is not torch.float32 for part in given) or rows.dtype not in {torch.float32, HALF}:
        return False
    return not any(isinstance(part, DTensor) for part in (rows, *given))


class HalfLinear(torch.autograd.Function):
    """Rows, a weight and None or a bias, and the three in bfloat16, to their product in bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, halves: tuple[Tensor, Tensor, Tensor | None]
    ) -> Tensor:
        """Multiply what is in bfloat16."""
        half_rows, half_weight, half_bias = halves
        flat = half_rows.reshape(-1, half_rows.shape[-1])
        out = flat @ half_weight.T if half_bias is None else torch.addmm(half_bias, flat, half_weight.T)
        ctx.save_for_backward(flat, half_weight)
        ctx.shape, ctx.types = rows.shape, (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return out.view(*rows.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the types of rows, weight and bias, each from a product or sum that is rounded once."""
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
    """Rows, the same in bfloat16, a `Joint` and its weights, then its biases if any, to one product in bfloat16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, half_rows: Tensor, joint: Joint, *learned: Tensor) -> Tensor:
        """Multiply what is in bfloat16; `learned` are told of for their gradients."""
        flat = half_rows.reshape(-1, half_rows.shape[-1])
        out = flat @ joint.weight.T if joint.bias is None else torch.addmm(joint.bias, flat, joint.weight.T)
        ctx.save_for_backward(flat, joint.weight)
        ctx.shape, ctx.sizes, ctx.types = rows.shape, joint.sizes, (rows.dtype, learned[0].dtype)
        return out.view(*rows.shape[:-1], joint.weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the types of rows and weights, each a part of a product or sum that is rounded once."""
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
