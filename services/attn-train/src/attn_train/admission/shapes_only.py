"""Building modules without memory and without drawing weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_})


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled at random."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have shapes and no values.

    Drawing numbers for a tensor without memory makes torch import its compiler, which takes seconds.
    """
    with torch.device("meta"), _Undrawn():
        yield
