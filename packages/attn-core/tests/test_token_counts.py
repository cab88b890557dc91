"""Counts of tokens, by which penalties go, are those of counting the whole sequence anew."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from attn_core.kernels.sampling import TokenCounts

TOKENS = st.lists(st.integers(0, 9), max_size=12)


@given(TOKENS, st.lists(TOKENS, max_size=4))
def test_tokens_counted_as_they_come_are_those_counted_at_once(prompt, steps):
    grown = TokenCounts(prompt)
    for step in steps:
        grown.extend(step)
    generated = [token for step in steps for token in step]
    expected = dict.fromkeys(prompt, 0) | Counter(generated)
    assert dict(zip(grown.ids, grown.counts, strict=True)) == expected
    at_once = TokenCounts(prompt, generated)
    assert (at_once.ids, at_once.counts) == (grown.ids, grown.counts)
    assert (grown.ids.itemsize, grown.counts.itemsize) == (8, 4)
