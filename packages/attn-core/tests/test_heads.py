"""Query heads and the key/value heads they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import Heads
from attn_core.errors import InvalidValue


@given(st.integers(1, 8), st.integers(1, 6))
def test_equal_groups_are_consecutive_and_of_one_size(key_value, share):
    heads = Heads(query=key_value * share, key_value=key_value, key_size=4, value_size=4)
    assert heads.group_of == tuple(g for g in range(key_value) for _ in range(share))
    assert heads.per_group == share


@given(st.integers(1, 12), st.integers(1, 12))
def test_heads_that_do_not_divide_are_refused(query, key_value):
    if query % key_value:
        with pytest.raises(InvalidValue, match=r"heads\.key_value"):
            Heads(query=query, key_value=key_value, key_size=4, value_size=4)
    else:
        assert Heads(query=query, key_value=key_value, key_size=4, value_size=4).per_group == query // key_value


def test_an_explicit_map_may_be_irregular():
    heads = Heads(query=3, key_value=2, key_size=4, value_size=4, groups=(0, 1, 1))
    assert heads.group_of == (0, 1, 1)
    assert heads.per_group is None


def test_an_explicit_map_that_is_regular_counts_as_regular():
    assert Heads(query=4, key_value=2, key_size=4, value_size=4, groups=(0, 0, 1, 1)).per_group == 2
    assert Heads(query=4, key_value=2, key_size=4, value_size=4, groups=(0, 1, 0, 1)).per_group is None


@pytest.mark.parametrize("groups", [(0, 1), (0, 1, 2, 0), (0, -1, 0, 1)])
def test_a_map_that_names_no_such_head_is_refused(groups):
    with pytest.raises(InvalidValue, match=r"heads\.groups.*4 entries from 0 to 1"):
        Heads(query=4, key_value=2, key_size=4, value_size=4, groups=groups)


@pytest.mark.parametrize("field", ["query", "key_value", "key_size", "value_size"])
def test_no_count_is_less_than_one(field):
    sizes = {"query": 2, "key_value": 2, "key_size": 4, "value_size": 4, field: 0}
    with pytest.raises(InvalidValue, match=rf"heads\.{field}: 0"):
        Heads(**sizes)
