"""The precision in which the linear layers of a model multiply while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Bfloat16Products(TorchFunctionMode):
    """Within it, linear layers of float32 multiply in bfloat16, forwards and backwards (arXiv 1905.12322).

    Weights, gradients, attention, norms and losses stay in float32. `torch.autocast` would take attention with it,
    whose bfloat16 form in torch is many times slower on a CPU.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any function but that of linear layers is left as it is."""
        if func is functional.linear:
            return product(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def product(linear: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's names
    """`linear` in bfloat16, its result in float32; what is not float32 is left alone."""
    if input.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return linear(input, weight, bias)
    half = torch.bfloat16
    return linear(input.to(half), weight.to(half), None if bias is None else bias.to(half)).float()


PRECISIONS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "float32": nullcontext,
    "bfloat16": Bfloat16Products,
}
"""What updates are made in, by name."""
