"""What a mechanism costs, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes one call is priced at: `batch` sequences of `query` queries over `key` keys each."""

    batch: int = 1
    query: int = 1
    key: int = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Prices of one call of one layer, forward only.

    `flops` counts the matrix products of the plain computation, two per multiply-add, as torch's FLOP counter
    does; `allowed_flops` counts only the query-key pairs that the mask allows, which is what a perfect kernel
    would do. `parameters` is a number of weights.
    """

    flops: int
    allowed_flops: int
    parameters: int

    def __add__(self, other: Cost) -> Cost:
        """The price of both."""
        return Cost(
            flops=self.flops + other.flops,
            allowed_flops=self.allowed_flops + other.allowed_flops,
            parameters=self.parameters + other.parameters,
        )
