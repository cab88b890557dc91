"""Rows that a mechanism gives, against those that it must give."""

from __future__ import annotations

from attn_core.errors import InternalError
from torch import Tensor


def require_rows(given: Tensor, like: Tensor) -> Tensor:
    """`given`, if its shape is that of `like`; one that is not could be broadcast and be wrong in silence.

    Raises `InternalError` with both shapes.
    """
    if given.shape != like.shape:
        shapes = tuple(given.shape), tuple(like.shape)
        raise InternalError(f"the attention gave rows of the shape {shapes[0]}; needed: {shapes[1]}")
    return given
