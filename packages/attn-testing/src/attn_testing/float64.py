"""Computes float32 models in float64, where two implementations that differ do not differ by rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WideMode(TorchFunctionMode):
    """Gives float64 to whatever asks torch for float32."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` with float64 in place of float32."""
        if func is Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def wide(value: Any) -> Any:
    """float64 for float32, anything else as it is."""
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """A context in which float64 is the default, and whatever asks torch for float32 gets float64.

    Models convert norms, rotary angles, softmax and recurrences to float32 whatever dtype they are in; `Module.double`
    alone leaves the rounding of these. Kernels that are not torch's, and bits read as float32, are out of its reach.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WideMode():
            yield
    finally:
        torch.set_default_dtype(usual)


def widened(build: Callable[[], nn.Module], weights: nn.Module) -> nn.Module:
    """The model that `build` makes, in float64 and evaluation mode, with the weights of another of its kind.

    Call it within `in_float64`: what a model computes when it is built, such as rotary angles, is then exact too.
    """
    model = build().double().eval()
    model.load_state_dict(weights.state_dict())
    return model
