"""Likeliest tokens without logits: what a model and its unembedding may offer to those who decode greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class FindsLikeliest(Protocol):
    """A language model that finds likeliest tokens without giving logits."""

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """The likeliest token [rows], int64, of hidden rows [rows, width]: the first of the largest logits.

        It is -1 where the largest is infinite or any logit is NaN. None where only `logits` can tell.
        """
        ...


@runtime_checkable
class FindsLargest(Protocol):
    """A packed layer that finds the largest output of each row without giving all outputs."""

    def largest(self, rows: Tensor) -> Tensor | None:
        """The place of the largest output [...], int64, of rows [..., inputs], the first of equal ones.

        It is -1 where the largest is infinite or any output is NaN. None where only all outputs can tell.
        """
        ...
