"""Backward passes that cannot be differentiated again, and say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from attn_core.errors import Incompatible

Found = TypeVar("Found")


def first_order_only(backward: Callable[..., Found]) -> Callable[..., Found]:
    """Decorate the `backward` of a `torch.autograd.Function`, or of a custom operator, to refuse second derivatives.

    The decorated function raises `Incompatible` with the function's name if the backward pass is recorded
    (`create_graph=True`). `torch.autograd.function.once_differentiable` refuses only if nothing else leads from the
    gradient to the inputs; otherwise the second derivative is silently without this function's part. Compiled code is
    not affected: torch itself refuses to differentiate its backward pass.
    """
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    name = f"{backward.__module__}.{backward.__qualname__}"

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Found:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise Incompatible(
                f"{name} computes gradients that cannot be differentiated again, and was called with create_graph=True;"
                " for second derivatives choose a computation in PyTorch's own operations: use_kernel('plain')"
            )
        return backward(ctx, *gradients)

    return refusing
