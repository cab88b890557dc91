"""Linear layers of float32 weights on a GPU, multiplied in bfloat16 with few casts, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attn_models.losses import wide_product
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

HALF = torch.bfloat16


class HalfWeights:
    """The weights and biases of a model's linear layers in bfloat16, cast together by one operation.

    They are those of the last `refresh`: whoever changes the weights calls it before they are read again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = list(
            {id(weight): weight for weight in _of_linear_layers(model) if weight.dtype is torch.float32}.values()
        )
        self._halves = [torch.empty_like(weight, dtype=HALF, requires_grad=False) for weight in self._kept]
        self._of = {id(weight): half for weight, half in zip(self._kept, self._halves, strict=True)}

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights as they are now."""
        if self._kept:
            torch._foreach_copy_(self._halves, self._kept)

    def of(self, weight: Tensor) -> Tensor:
        """A weight or bias in bfloat16: what was cast before, or a new cast of one that is not of the model."""
        found = self._of.get(id(weight))
        return weight.detach().to(HALF) if found is None else found


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
        self._last: tuple[Tensor, int, Tensor] | None = None
        """The rows that were cast last, their version then, and the cast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Other functions than linear layers are left as they are."""
        if func is functional.linear and not torch.compiler.is_compiling():
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: object) -> None:
        """Keep no rows."""
        self._last = None
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
