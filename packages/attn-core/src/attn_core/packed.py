"""Texts of different lengths laid end to end in one row, so that nothing is padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from attn_core.errors import InvalidValue
from attn_core.mask.checks import at_least

if TYPE_CHECKING:
    from attn_core.kernel import Operands


@dataclass(frozen=True)
class Packed:
    """`queries[t]` queries and `keys[t]` keys of text t, end to end; text 0 begins each row of a batch.

    Each text is attended alone: positions start anew, queries are aligned to the end of their own keys. Raises
    `InvalidValue` for a negative length, and where not every text has both.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.keys):
            given = len(self.queries), len(self.keys)
            raise InvalidValue.of("packed.queries, keys", given, "one number of each for every text")
        for name, lengths in (("queries", self.queries), ("keys", self.keys)):
            for length in lengths:
                at_least(f"packed.{name}", length, 0)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Packed:
        """Texts that attend to themselves."""
        return cls(tuple(lengths), tuple(lengths))

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each text."""
        for query, key in zip(pairwise(starts(self.queries)), pairwise(starts(self.keys)), strict=True):
            yield slice(*query), slice(*key)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each text begins, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def texts(operands: Operands) -> Iterator[Operands]:
    """The operands of each packed text; raises `InvalidValue`, see `check_packed`.

    Where weights are dropped, rows of a batch are counted on from text to text.
    """
    packed = operands.packed
    check_packed(operands)
    for number, (query, key) in enumerate(() if packed is None else packed.spans()):
        first = number * operands.query.shape[0]
        yield dataclasses.replace(
            operands,
            query=operands.query[:, query],
            key=operands.key[:, key],
            value=operands.value[:, key],
            keep=None if operands.keep is None else operands.keep[:, key],
            fields={name: field[:, key] for name, field in operands.fields.items()},
            packed=None,
            dropout=operands.dropout and dataclasses.replace(operands.dropout, first=operands.dropout.first + first),
        )


def check_packed(operands: Operands) -> None:
    """Raise `InvalidValue` unless the texts are all that queries and keys hold, at positions that follow from them."""
    packed = operands.packed
    if packed is None:
        return
    for name, lengths, rows in (("queries", packed.queries, operands.query), ("keys", packed.keys, operands.key)):
        if sum(lengths) != rows.shape[1]:
            raise InvalidValue.of(f"packed.{name}", sum(lengths), f"{rows.shape[1]} in all, as there are rows")
    if operands.query_positions is not None or operands.key_positions is not None:
        raise InvalidValue.of("positions", "given", "none beside packed texts, in which they start anew")
