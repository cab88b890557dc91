"""Who guesses what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from attn_engine.sequence import Sequence as Growing


@dataclass(frozen=True)
class Wanted:
    """A sequence that decodes, and the most tokens to guess for it."""

    sequence: Growing
    most: int


class Proposer(Protocol):
    """Guesses tokens for sequences that decode. What it guesses changes the number of steps and nothing else."""

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[list[int]]:
        """Tokens that may follow each sequence, perhaps none; together at most so many."""
        ...

    def forget(self, sequence: Growing) -> None:
        """Free what is held for a sequence that ended, or has to wait."""
        ...


class LookupProposer:
    """Guesses what followed the same words in the sequence itself."""

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[list[int]]:
        """See `Proposer.propose`."""
        guesses = []
        for one in wanted:
            allowed = min(one.most, most)
            guesses.append(one.sequence.lookup.guess(one.sequence.tokens, allowed) if allowed > 0 else [])
            most -= len(guesses[-1])
        return guesses

    def forget(self, sequence: Growing) -> None:
        """Nothing is held beside the sequence."""
