"""Pairs that a rule makes: small tasks on which models with a source can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

WORDS, LONGEST, PAIRS = 40, 20, 20_000
"""Words of the language, and words in the longest source of the sets known by name, and how many pairs these have."""

Rule = Callable[[Sequence[int]], Sequence[int]]


def swapped(words: Sequence[int]) -> list[int]:
    """Every two neighbours exchanged: 1 2 3 4 5 becomes 2 1 4 3 5."""
    return [word for place in range(0, len(words), 2) for word in reversed(words[place : place + 2])]


RULES: dict[str, Rule] = {
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "words": lambda words: words,
    "dictionary": swapped,
}
"""What becomes of the order."""
REPLACED = {"words", "dictionary"}
"""Rules that also replace each word by another one, so that the target is a language of its own."""


def synthetic_pairs(
    name: str, count: int, seed: int, *, shortest: int = 1, longest: int = LONGEST
) -> list[tuple[str, str]]:
    """`count` pairs of `shortest` to `longest` words, evenly spread; equal arguments give equal pairs."""
    choose = random.Random(f"{name}:{seed}")
    translation = list(range(WORDS))
    if name in REPLACED:
        random.Random(name).shuffle(translation)
    written = "t" if name in REPLACED else "s"
    pairs = []
    for _ in range(count):
        source = [choose.randrange(WORDS) for _ in range(choose.randint(shortest, longest))]
        target = [translation[word] for word in RULES[name](source)]
        pairs.append((" ".join(f"s{word}" for word in source), " ".join(f"{written}{word}" for word in target)))
    return pairs
