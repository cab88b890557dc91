"""Guessed tokens against what the model makes of them.

Every position gets the token that would have been chosen without a guess: the likeliest, or that of the position's own
random number. A guess that equals it was right, and the next position is known to follow the right tokens; at the first
that does not, what was computed behind it is taken back. So guesses change nothing but the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_core import BranchingStore
from torch import Tensor

from attn_engine.outcome import Progress
from attn_engine.sequence import Sequence as Growing

Choose = Callable[[Sequence[Growing], Tensor], list[Progress]]
"""Chooses the next token of each sequence from logits [sequences, vocabulary]."""


@dataclass(frozen=True)
class Guess:
    """Guessed tokens of a sequence, and the rows of the logits that follow each."""

    sequence: Growing
    tokens: tuple[int, ...]
    rows: range


def verify(first: Sequence[Progress], guesses: Sequence[Guess], logits: Tensor, choose: Choose) -> list[Progress]:
    """`first` is what came of the tokens before the guesses; with it, what comes of those guesses that were right."""
    found = {progress.sequence.number: progress for progress in first}
    open_guesses = list(guesses)
    for place in range(max((len(guess.tokens) for guess in guesses), default=0)):
        open_guesses = [guess for guess in open_guesses if _right(found[guess.sequence.number], guess, place)]
        if not open_guesses:
            break
        for guess in open_guesses:
            guess.sequence.accepted += 1
        rows = [guess.rows[place] for guess in open_guesses]
        for progress in choose([guess.sequence for guess in open_guesses], logits[rows]):
            number = progress.sequence.number
            found[number] = found[number].then(progress)
    return list(found.values())


def settle(guess: Guess, store: BranchingStore) -> None:
    """Note how far the states of a sequence that goes on are right, and take back the rest."""
    sequence = guess.sequence
    right, computed = len(sequence.tokens) - 1, sequence.computed + len(guess.tokens)
    sequence.computed = computed if right == computed else store.rewind(sequence.number, right)


def _right(progress: Progress, guess: Guess, place: int) -> bool:
    if progress.reason is not None or place >= len(guess.tokens):
        return False
    return progress.tokens[place].id == guess.tokens[place]
