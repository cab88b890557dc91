from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from attn_kernels_triton.attention.plan import LARGE_BLOCK, SMALL_BLOCK
from attn_kernels_triton.attention.tiles import CHOICES, LISTED_CHOICES, Sizes, choice_of


@pytest.mark.parametrize("block", [SMALL_BLOCK, LARGE_BLOCK])
@pytest.mark.parametrize("name", CHOICES, ids=str)
def test_no_tile_reaches_over_the_blocks_of_a_list(name, block):
    program, half, width = name
    dtype = torch.bfloat16 if half else torch.float32
    chosen = choice_of(program, Sizes(dtype, width, width, 4096, 4096, block))
    assert block % chosen.queries == 0
    assert block % chosen.keys == 0


def test_what_is_chosen_for_lists_is_taken_for_lists_alone():
    for (program, _, width), chosen in LISTED_CHOICES.items():
        sizes = Sizes(torch.bfloat16, width, width, 4096, 4096)
        assert choice_of(program, sizes._replace(block=LARGE_BLOCK)) == chosen
        assert choice_of(program, sizes) != chosen
