"""Masks that differ by head, or depend on the number of keys, and what they refuse before they are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec, Causal, Heads, Window
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import AttendProblem, attend_problem
from attn_core.masks import BigBird, Neighbourhood, PerHead, Prefix, blocks

TWO = PerHead((Window(left=1), Window(left=2, dilation=2)))
FOUR_HEADS = BigBird(block=2, random=2, number_of_heads=4)


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_count_of_a_mask_that_differs_by_head_is_the_sum_over_its_heads(queries, keys):
    for mask in (TWO, TWO & Causal(), ~TWO, Prefix(2) | TWO, FOUR_HEADS, FOUR_HEADS & Causal()):
        assert mask.count(queries, keys) == sum(mask.of_head(head).count(queries, keys) for head in range(mask.heads))


def test_each_part_of_a_composite_is_asked_for_its_head():
    composite = (TWO & Causal()) | Prefix(1)
    assert composite.heads == 2
    for head in range(2):
        head_mask = composite.of_head(head)
        assert head_mask.heads is None
        assert [k for k in range(9) if head_mask.allows(8, k)] == [[0, 7, 8], [0, 4, 6, 8]][head]


def test_what_is_the_same_for_all_heads_and_lengths_is_given_back():
    for mask in (Causal(), Window(left=2) | Prefix(3), ~Causal()):
        assert mask.over(9) is mask
        assert mask.of_head(3) is mask


@pytest.mark.parametrize("mask", [TWO, TWO & Causal(), FOUR_HEADS.over(99)])
def test_a_mask_that_differs_by_head_does_not_answer_for_all_heads(mask):
    with pytest.raises(InvalidValue, match="of_head"):
        mask.allows(44, 50)
    with pytest.raises(InvalidValue, match="of_head"):
        blocks(mask, 9, 9, 2)


@pytest.mark.parametrize("mask", [Neighbourhood(size=3), FOUR_HEADS.of_head(0), ~Neighbourhood(size=3)])
def test_a_mask_that_depends_on_the_length_does_not_answer_before_it_is_told(mask):
    assert mask.by_length
    assert not mask.over(9).by_length
    with pytest.raises(InvalidValue, match="over"):
        mask.allows(2, 3)


def test_heads_of_masks_must_be_those_of_the_attention():
    heads = Heads(query=4, key_value=2, key_size=8, value_size=8)
    assert AttentionSpec(heads=heads, mask=FOUR_HEADS).mask is FOUR_HEADS
    with pytest.raises(InvalidValue, match=r"mask\.heads: 2 is not allowed; allowed: 4"):
        AttentionSpec(heads=heads, mask=TWO)
    with pytest.raises(InvalidValue, match=r"mask\.heads"):
        TWO | FOUR_HEADS
    with pytest.raises(InvalidValue, match=r"per_head\.masks"):
        PerHead((FOUR_HEADS,))


def test_a_problem_says_what_a_mask_must_be_told_and_how_much_is_left():
    heads = Heads(query=4, key_value=4, key_size=8, value_size=8)
    call = {"dtype": "float32", "device": "cpu", "gradients": False, "padded": False}
    plain = attend_problem(AttentionSpec(heads=heads, mask=Window(left=63)), **call)
    assert (plain.head_masks, plain.length_bound, plain.density) == (False, False, AttendProblem.density)
    sized = attend_problem(AttentionSpec(heads=heads, mask=Window(left=64)), **call, queries=4096, keys=4096)
    assert sized.density == pytest.approx(128 / 4096, rel=0.1)
    per_head = attend_problem(AttentionSpec(heads=heads, mask=FOUR_HEADS), **call)
    assert (per_head.head_masks, per_head.length_bound) == (True, True)


def test_a_dilated_window_leaves_as_little_as_a_dense_one():
    call = {"dtype": "float32", "device": "cpu", "gradients": False, "padded": False, "queries": 4096, "keys": 4096}
    heads = Heads(query=1, key_value=1, key_size=8, value_size=8)
    problems = [attend_problem(AttentionSpec(heads=heads, mask=Window(left=64, dilation=d)), **call) for d in (1, 8)]
    assert problems[1].density == pytest.approx(problems[0].density, rel=0.2)
