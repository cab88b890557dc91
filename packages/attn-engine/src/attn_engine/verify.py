"""Guessed tokens against what the model makes of them.

Every position gets the token that would have been chosen without a guess: the likeliest, or that of the position's own
random number. A guess that equals it was right, and the next position is known to follow the right tokens; at the first
that does not, what was computed behind it is taken back. So guesses change nothing but the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from attn_core.stores import BranchingStore, TreeStore

from attn_engine.outcome import Progress
from attn_engine.sequence import Sequence as Growing
from attn_engine.token_tree import TokenTree

Choose = Callable[[Sequence[tuple[Growing, int]]], list[Progress]]
"""Chooses the next token of each sequence, of which the place of what follows is given."""


@dataclass
class Guess:
    """Guessed tokens of a sequence, the places of what follows each, and which of them were right so far."""

    sequence: Growing
    tree: TokenTree
    places: range
    right: list[int] = field(default_factory=list)

    def follow(self, progress: Progress) -> bool:
        """Whether the sequence goes on with a token that was guessed, which then is the last of those that were
        right."""
        if progress.reason is not None:
            return False
        node = self.tree.child(self.right[-1] if self.right else -1, progress.tokens[-1].id)
        if node is None:
            return False
        self.right.append(node)
        self.sequence.accepted += 1
        return True


def verify(first: Sequence[Progress], guesses: Sequence[Guess], choose: Choose) -> list[Progress]:
    """`first` is what came of the tokens before the guesses; with it, what comes of those guesses that were right."""
    found = {progress.sequence.number: progress for progress in first}
    going_on = list(guesses)
    while going_on := [guess for guess in going_on if guess.follow(found[guess.sequence.number])]:
        for progress in choose([(guess.sequence, guess.places[guess.right[-1]]) for guess in going_on]):
            number = progress.sequence.number
            found[number] = found[number].then(progress)
    return list(found.values())


def settle(guess: Guess, store: BranchingStore) -> None:
    """Note how far the states of a sequence that goes on are right, and take back the rest."""
    sequence, known = guess.sequence, guess.sequence.computed
    right = len(sequence.tokens) - 1
    if guess.tree.branches:
        cast("TreeStore", store).accept_path(sequence.number, known, [known + node for node in guess.right])
        sequence.computed = right
    else:
        computed = known + len(guess.tree)
        sequence.computed = computed if right == computed else store.rewind(sequence.number, right)
