"""Captions of drawn images: one or two handwritten digits side by side, and words that say which stands where."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

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
