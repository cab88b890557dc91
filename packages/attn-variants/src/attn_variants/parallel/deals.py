"""How the tokens of a sequence are dealt to ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from attn_core.errors import InvalidValue
from torch import Tensor


@dataclass(frozen=True)
class Deal(ABC):
    """Which positions each of `ranks` holds; all hold equally many."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InvalidValue.of("ranks", self.ranks, "a whole number from 1")

    def places(self, rank: int, tokens: int) -> Tensor:
        """The positions of a rank, int64; raises `InvalidValue` where the tokens cannot be dealt equally."""
        if tokens % self.ranks:
            raise InvalidValue.of("tokens", tokens, f"a multiple of the {self.ranks} ranks")
        return self.dealt(rank, tokens // self.ranks)

    @abstractmethod
    def dealt(self, rank: int, count: int) -> Tensor:
        """The positions of a rank where every one has `count`."""


@dataclass(frozen=True)
class Contiguous(Deal):
    """One piece of the sequence after the other (Liu et al. 2023, arXiv 2310.01889)."""

    def dealt(self, rank: int, count: int) -> Tensor:
        """The rank's piece."""
        return torch.arange(rank * count, (rank + 1) * count)


@dataclass(frozen=True)
class Striped(Deal):
    """In turn, a token each, so that a causal mask leaves all ranks alike to do (Brandon et al. 2023, 2311.09431)."""

    def dealt(self, rank: int, count: int) -> Tensor:
        """Every position that leaves the rank when divided by the ranks."""
        return torch.arange(count) * self.ranks + rank
