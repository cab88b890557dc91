"""Synthetic pairs: small tasks for comparing models, and captioned images of handwritten digits."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from pathlib import Path

WORDS, MAX_WORDS, PAIRS = 40, 20, 20_000
"""Vocabulary, maximum source length in words, and number of pairs of the named tasks."""
MAX_NEEDLE_WORDS = 60
"""Maximum source length of the needle task, in words."""
ENTRIES = 8
"""Maximum number of keys that a source defines in the recall and glossary tasks."""
SWAPPED = 3
"""The number of things whose order the swaps task asks for."""

Rule = Callable[[Sequence[int]], Sequence[int]]
Pair = tuple[list[str], list[str]]
Maker = Callable[[random.Random, int, int], Pair]
"""Makes a source, of about `shortest` to `longest` words, and its target: (random, shortest, longest) -> pair."""


def swap_neighbours(words: Sequence[int]) -> list[int]:
    """Swap each pair of neighbours: 1 2 3 4 5 becomes 2 1 4 3 5."""
    return [word for place in range(0, len(words), 2) for word in reversed(words[place : place + 2])]


RULES: dict[str, Rule] = {
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "words": lambda words: words,
    "dictionary": swap_neighbours,
}
"""How each rule orders the words of the target."""
REPLACED = {"words", "dictionary"}
"""Rules that also replace each word by another one, so that the target has a vocabulary of its own."""


def recall_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """Associative recall (Graves et al. 2014, arXiv 1410.5401): key-value pairs, then a key; the target is its value.

    The target of "k3 v9 k1 v4 k7 v4 k1" is "v4".
    """
    keys, values = _entries(choose, shortest, longest)
    asked = choose.randrange(len(keys))
    return [*_listed(keys, values), f"k{keys[asked]}"], [f"v{values[asked]}"]


def needle_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """Needle in a haystack: the target is the word after the mark "needle", which is at a random position.

    The target of "s5 s2 needle s7 s2 s2 ?" is "s7".
    """
    words = [f"s{choose.randrange(WORDS)}" for _ in range(choose.randint(max(2, shortest), max(2, longest)))]
    place = choose.randrange(len(words))
    return [*words[:place], "needle", *words[place:], "?"], [words[place]]


def glossary_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """Recall of several values: key-value pairs, then some of the keys; the target is their values, in this order.

    The target of "k3 v9 k1 v4 k7 v2 : k7 k3" is "v2 v9".
    """
    keys, values = _entries(choose, shortest, longest)
    asked = [choose.randrange(len(keys)) for _ in range(choose.randint(1, len(keys)))]
    source = [*_listed(keys, values), ":", *(f"k{keys[place]}" for place in asked)]
    return source, [f"v{values[place]}" for place in asked]


def swaps_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """State tracking, the word problem of permutations (Merrill et al. 2024, arXiv 2404.08819): neighbours change
    places, one pair after the other; the target is the order of the things in the end.

    The target of "p0 p1 p0" is "t2 t1 t0": of t0 t1 t2, first those at the places 0 and 1 are swapped.
    """
    places = [choose.randrange(SWAPPED - 1) for _ in range(choose.randint(shortest, longest))]
    order = list(range(SWAPPED))
    for place in places:
        order[place], order[place + 1] = order[place + 1], order[place]
    return [f"p{place}" for place in places], [f"t{thing}" for thing in order]


MAKERS: dict[str, Maker] = {
    "recall": recall_pair,
    "needle": needle_pair,
    "glossary": glossary_pair,
    "swaps": swaps_pair,
}
"""Tasks whose target is not the words of the source in another order or other words."""
TASKS = {
    "copy": "the words of the source",
    "reverse": "the words of the source, last word first",
    "words": "the source word by word, in other words",
    "dictionary": "the source in other words, each pair of neighbours swapped",
    "recall": "associative recall: the value of one of the keys of the source",
    "needle": "a needle in a haystack: the word after the mark",
    "glossary": "the values of several keys of the source",
    "swaps": "state tracking: the order of three things after swaps of neighbours",
}
"""What each task asks for."""


def synthetic_pairs(
    name: str, count: int, seed: int, *, shortest: int = 1, longest: int | None = None
) -> list[tuple[str, str]]:
    """Return `count` pairs with sources of about `shortest` to `longest` words, uniformly distributed.

    Equal arguments give equal pairs. `longest` defaults to 60 words for the needle task, else 20.
    """
    longest = longest or (MAX_NEEDLE_WORDS if name == "needle" else MAX_WORDS)
    choose = random.Random(f"{name}:{seed}")
    if name in MAKERS:
        made = (MAKERS[name](choose, shortest, longest) for _ in range(count))
        return [(" ".join(source), " ".join(target)) for source, target in made]
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


def _entries(choose: random.Random, shortest: int, longest: int) -> tuple[list[int], list[int]]:
    """Draw distinct keys and a value for each, so that both together have about `shortest` to `longest` words."""
    max_entries = max(1, min(ENTRIES, longest // 2))
    count = choose.randint(min(max_entries, max(1, shortest // 2)), max_entries)
    return choose.sample(range(WORDS), count), [choose.randrange(WORDS) for _ in range(count)]


def _listed(keys: Sequence[int], values: Sequence[int]) -> list[str]:
    return [word for key, value in zip(keys, values, strict=True) for word in (f"k{key}", f"v{value}")]


SAMPLE_FILE = Path(__file__).parent / "samples" / "digits.csv.gz"
SIDE = 8
"""The rows and columns of a digit; a captioned image is two digits side by side."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 297
"""The number of digits that are used for validation images only."""

Digit = tuple[list[list[str]], str]
"""Rows of pixels from 0 to 16, written as words, and the number's name."""
BLANK = [["0"] * SIDE for _ in range(SIDE)]


def digits() -> list[Digit]:
    """Return the digits of the included sample, in the order of the file."""
    with gzip.open(SAMPLE_FILE, "rt", encoding="ascii") as file:
        rows = [[str(int(float(value))) for value in line.split(",")] for line in file]
    return [
        ([row[start : start + SIDE] for start in range(0, SIDE * SIDE, SIDE)], NUMBERS[int(row[-1])]) for row in rows
    ]


def caption_pairs(count: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return `count` training images with captions, and a tenth as many for validation, made of other digits.

    A source is the pixels of an image, row by row. Equal arguments give equal pairs.
    """
    known = digits()
    choose = random.Random(f"captions:{seed}")
    training = [caption(choose, known[:-HELD_OUT]) for _ in range(count)]
    return training, [caption(choose, known[-HELD_OUT:]) for _ in range(max(1, count // 10))]


def caption(choose: random.Random, known: list[Digit]) -> tuple[str, str]:
    """Return one image, as words, and its caption."""
    (left, first), (right, second) = choose.choice(known), choose.choice(known)
    kind = choose.choice(("both", "both", "left", "right"))
    if kind == "left":
        right, text = BLANK, f"a {first} on the left"
    elif kind == "right":
        left, text = BLANK, f"a {second} on the right"
    else:
        text = f"a {first} to the left of a {second}"
    return " ".join(shade for pair in zip(left, right, strict=True) for row in pair for shade in row), text
