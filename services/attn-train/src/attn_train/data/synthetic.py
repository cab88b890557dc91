"""Synthetic pairs: small tasks on which models can be compared, and captions of handwritten digits."""

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
"""The most keys that a text defines in the tasks of memory."""

Rule = Callable[[Sequence[int]], Sequence[int]]
Pair = tuple[list[str], list[str]]
Maker = Callable[[random.Random, int, int], Pair]
"""Makes a source, of the shortest to the longest length in words, and its target."""


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


def recall_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """Keys with values, then one of the keys: its value (associative recall, Graves et al. 2014, arXiv 1410.5401).

    "k3 v9 k1 v4 k7 v4 k1" is answered by "v4".
    """
    keys, values = _entries(choose, shortest, longest)
    asked = choose.randrange(len(keys))
    return [*_listed(keys, values), f"k{keys[asked]}"], [f"v{values[asked]}"]


def found(choose: random.Random, shortest: int, longest: int) -> Pair:
    """Words of which one, anywhere, follows a mark, then a question: that word (a needle in a haystack).

    "s5 s2 needle s7 s2 s2 ?" is answered by "s7".
    """
    words = [f"s{choose.randrange(WORDS)}" for _ in range(choose.randint(max(2, shortest), max(2, longest)))]
    place = choose.randrange(len(words))
    return [*words[:place], "needle", *words[place:], "?"], [words[place]]


def glossary_pair(choose: random.Random, shortest: int, longest: int) -> Pair:
    """A dictionary that only this text has, then some of its keys: their values, in the order of the keys.

    "k3 v9 k1 v4 k7 v2 : k7 k3" is answered by "v2 v9".
    """
    keys, values = _entries(choose, shortest, longest)
    asked = [choose.randrange(len(keys)) for _ in range(choose.randint(1, len(keys)))]
    source = [*_listed(keys, values), ":", *(f"k{keys[place]}" for place in asked)]
    return source, [f"v{values[place]}" for place in asked]


MAKERS: dict[str, Maker] = {"recall": recall_pair, "needle": found, "glossary": glossary_pair}
"""Tasks whose answer is in the source, at a position that must be found."""
TASKS = (*RULES, *MAKERS)


def synthetic_pairs(
    name: str, count: int, seed: int, *, shortest: int = 1, longest: int | None = None
) -> list[tuple[str, str]]:
    """`count` pairs of about `shortest` to `longest` words, evenly spread; equal arguments give equal pairs.

    Without `longest` it is 60 words where something is to be found, else 20.
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
    """Keys, none twice, and a value for each, in about as many words."""
    most = max(1, min(ENTRIES, longest // 2))
    count = choose.randint(min(most, max(1, shortest // 2)), most)
    return choose.sample(range(WORDS), count), [choose.randrange(WORDS) for _ in range(count)]


def _listed(keys: Sequence[int], values: Sequence[int]) -> list[str]:
    return [word for key, value in zip(keys, values, strict=True) for word in (f"k{key}", f"v{value}")]


SAMPLE_FILE = Path(__file__).parent / "samples" / "digits.csv.gz"
SIDE = 8
"""Rows and columns of a digit; an image has as many rows and twice as many columns."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD = 297
"""Digits of which only images for validation are made."""

Digit = tuple[list[list[str]], str]
"""Rows of shades from 0 to 16, written as words, and the number's name."""
BLANK = [["0"] * SIDE for _ in range(SIDE)]


def digits() -> list[Digit]:
    """The digits of the sample, in its order."""
    with gzip.open(SAMPLE_FILE, "rt", encoding="ascii") as file:
        rows = [[str(int(float(value))) for value in line.split(",")] for line in file]
    return [
        ([row[start : start + SIDE] for start in range(0, SIDE * SIDE, SIDE)], NUMBERS[int(row[-1])]) for row in rows
    ]


def caption_pairs(count: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """`count` images with their captions to train on, and a tenth as many, of other digits, for validation.

    A source is the shades of an image, row after row; equal arguments give equal pairs.
    """
    known = digits()
    choose = random.Random(f"captions:{seed}")
    training = [caption(choose, known[:-HELD]) for _ in range(count)]
    return training, [caption(choose, known[-HELD:]) for _ in range(max(1, count // 10))]


def caption(choose: random.Random, known: list[Digit]) -> tuple[str, str]:
    """One image, as words, and what is to be said of it."""
    (left, first), (right, second) = choose.choice(known), choose.choice(known)
    kind = choose.choice(("both", "both", "left", "right"))
    if kind == "left":
        right, said = BLANK, f"a {first} on the left"
    elif kind == "right":
        left, said = BLANK, f"a {second} on the right"
    else:
        said = f"a {first} to the left of a {second}"
    return " ".join(shade for pair in zip(left, right, strict=True) for row in pair for shade in row), said
