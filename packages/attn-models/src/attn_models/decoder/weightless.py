"""Building a model whose weights come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "_no_grad_normal_"})


@contextmanager
def weightless() -> Iterator[None]:
    """Modules built inside have parameters and buffers with shapes and types, but no memory (device "meta")."""
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Leaves out drawing random weights: on "meta" it has no effect, but torch imports its compiler for it (2 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in DRAWS and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)
