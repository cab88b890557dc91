"""What masks show of themselves is what they are."""

from __future__ import annotations

import re

import pytest

import attn_core
from attn_core import Causal, Mask, Window, masks
from attn_core.display import mask_grid
from attn_core.masks import PerHead, Prefix

NAMES = {**vars(masks), **vars(attn_core)}
MASKS = [
    Causal(),
    Causal() & Window(left=4) | Prefix(length=2),
    Causal() & (Prefix(length=2) | ~Window(left=1, right=1)),
    ~(Causal() & ~Prefix(length=3)),
    PerHead(masks=(Causal(), Window(left=2))),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_the_repr_of_a_mask_makes_it_again(mask: Mask) -> None:
    assert mask_grid(eval(repr(mask), NAMES)) == mask_grid(mask)  # noqa: S307 -- our own text


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_the_picture_of_a_mask_has_a_filled_square_for_each_pair_that_it_allows(mask: Mask) -> None:
    fills = re.findall(r'fill="(#\w+)"', mask._repr_html_())
    allowed = [pair for row in mask_grid(mask) for pair in row]
    assert len(set(fills)) == 2
    assert [fill == fills[allowed.index(True)] for fill in fills] == allowed
