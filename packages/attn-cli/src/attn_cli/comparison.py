"""The costs of mechanisms side by side: for `attn compare`, and in Python and notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from attn_core import Cost, Field, Slot, installed, state_bytes
from attn_core.display import table
from attn_core.states import dtype_name

from attn_cli.facts import price
from attn_cli.options import Sizes, own_groups, supported_sizes
from attn_cli.output import human_bytes, human_count

COUNTS = {
    "weights": "parameters",
    "flops": "flops",
    "allowed": "allowed_flops",
    "in sequence": "sequential_operations",
}
SIZES = {"state": "state_bytes", "per token": "state_bytes_per_token"}
KERNEL = 3
"""The number of tokens that a convolution reads."""


def lstm(sizes: Sizes, length: int) -> tuple[Cost, int, int]:
    """The cost of an LSTM layer as wide as its input, the elements of its state, h and c, and the operations that must
    wait for one another: a step for each token (Vaswani et al. 2017, table 1)."""
    width = sizes.hidden_size
    flops = length * 2 * 8 * width**2
    return Cost(flops=flops, allowed_flops=flops, parameters=8 * width**2 + 8 * width), 2 * width, length


def convolution(sizes: Sizes, length: int) -> tuple[Cost, int, int]:
    """As `lstm`, of a convolution of `KERNEL` tokens, which computes all tokens at once; its state is the last ones."""
    width = sizes.hidden_size
    flops = length * 2 * KERNEL * width**2
    parameters = KERNEL * width**2 + width
    return Cost(flops=flops, allowed_flops=flops, parameters=parameters), (KERNEL - 1) * width, 1


WITHOUT_ATTENTION = {"lstm": lstm, "convolution": convolution}
"""The layers without attention that `attn compare` also prices."""


class Comparison(tuple[dict[str, Any], ...]):
    """The rows of a comparison, with exact numbers; printed, and in a notebook, a table with units."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [{name: name for name in comparison(self[0])}, *map(comparison, self)] if self else []
        widths = {name: max(len(str(row[name])) for row in rows) for name in rows[0]} if rows else {}
        return "\n".join("  ".join(f"{row[name]!s:<{widths[name]}}" for name in row).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        return table([{name: str(value) for name, value in comparison(row).items()} for row in self])


def compare(
    *names: str, tokens: Iterable[int] = (1024, 4096, 16384), dtype: str = "float32", **sizes: Any
) -> Comparison:
    """The costs of one layer of each mechanism for sequences of `tokens` tokens, as `attn compare` prints them.

    `sizes` are fields of `Sizes`, such as `hidden_size` (512 by default), `num_heads` (8) and `num_kv_heads`. Raises
    `UnknownName` for an unknown mechanism, `InvalidValue` for bad sizes.
    """
    given = Sizes(**({"hidden_size": 512, "num_heads": 8, "num_kv_heads": None} | sizes))
    return Comparison(priced(names, given, list(tokens), dtype_name(dtype)))


def priced(names: Sequence[str], sizes: Sizes, lengths: list[int], dtype: str) -> list[dict[str, Any]]:
    """One row of costs per mechanism and length."""
    return [row(name, sizes, length, dtype) for name in dict.fromkeys(names) for length in lengths]


def row(name: str, sizes: Sizes, length: int, dtype: str) -> dict[str, Any]:
    """The costs of one mechanism at one length."""
    if name in WITHOUT_ATTENTION and name not in installed().mechanisms.names():
        cost, elements, waiting = WITHOUT_ATTENTION[name](sizes, length)
        state = state_bytes({"state": Slot(fields={"h": Field((elements,))})}, tokens=length, dtype=dtype)
        facts = dataclasses.asdict(cost) | {"tokens": length, "state_bytes": state, "state_bytes_per_token": 0}
    else:
        mechanism = installed().mechanisms.get(name)
        fitted = own_groups(supported_sizes(sizes, mechanism), mechanism, {})
        facts = price(mechanism, fitted.config(mechanism, {}), length, dtype)
        waiting = mechanism.sequential_operations(length)
    kept = ("tokens", "parameters", "flops", "allowed_flops", "state_bytes", "state_bytes_per_token")
    return {"name": name} | {key: facts[key] for key in kept} | {"sequential_operations": waiting}


def comparison(facts: dict[str, Any]) -> dict[str, Any]:
    """A row with human-readable values, which fits the width of a terminal."""
    counted = {short: human_count(facts[key]) for short, key in COUNTS.items()}
    sized = {short: human_bytes(facts[key]) for short, key in SIZES.items()}
    return {"name": facts["name"], "tokens": facts["tokens"]} | counted | sized
