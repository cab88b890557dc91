"""Who guesses what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from attn_engine.sequence import Sequence as Growing
from attn_engine.token_tree import TokenTree


@dataclass(frozen=True)
class Wanted:
    """A sequence that decodes, how many tokens to guess ahead, and in how many ways to go on at most."""

    sequence: Growing
    most: int
    branches: int = 1


class Proposer(Protocol):
    """Guesses tokens for sequences that decode. What it guesses changes the number of steps and nothing else."""

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[TokenTree]:
        """Tokens that may follow each sequence, perhaps none; together at most so many."""
        ...

    def forget(self, sequence: Growing) -> None:
        """Free what is held for a sequence that ended, or has to wait."""
        ...


class LookupProposer:
    """Guesses what followed the same words in the sequence itself."""

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[TokenTree]:
        """See `Proposer.propose`."""
        guesses = []
        for one in wanted:
            guess = one.sequence.lookup.guess(one.sequence.tokens, one.most, one.branches) if most > 0 else TokenTree()
            guesses.append(guess.first(most))
            most -= len(guesses[-1])
        return guesses

    def forget(self, sequence: Growing) -> None:
        """Nothing is held beside the sequence."""
