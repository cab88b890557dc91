"""Bytes of states, by their formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import Field, Paged, Slot, Source, StateSpec, state_bytes
from attn_core.errors import UnknownName
from attn_core.states import ELEMENT_BYTES, dtype_name, element_bytes

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ELEMENT_BYTES))


@given(shapes, shapes, dtypes, st.integers(0, 50), st.integers(0, 20), st.integers(1, 30))
def test_bytes_are_rows_times_elements_times_their_size(one, other, dtype, tokens, source, window):
    fields = {"one": Field(one), "other": Field(other, "int8")}

    def elements(shape):
        count = 1
        for side in shape:
            count *= side
        return count

    row = elements(one) * ELEMENT_BYTES[dtype] + elements(other)
    assert Paged(fields).bytes(tokens, source, dtype) == tokens * row
    assert Paged(fields, window=window).bytes(tokens, source, dtype) == min(tokens, window) * row
    assert Slot(fields).bytes(tokens, source, dtype) == row
    assert Source(fields).bytes(tokens, source, dtype) == source * row
    assert Source(fields, rows=2).bytes(tokens, source, dtype) == 2 * row
    all_kinds = {"kv": Paged(fields), "sums": Slot(fields), "memory": Source(fields)}
    assert state_bytes(all_kinds, tokens=tokens, source=source, dtype=dtype) == (tokens + 1 + source) * row


def test_a_layer_of_llama_3_70b_remembers_what_the_courses_say():
    keys = {"key": Field((8, 128)), "value": Field((8, 128))}
    layer = state_bytes({"kv": Paged(keys)}, tokens=1000, dtype="bf16")
    assert 80 * 8 * layer == 2621440000


def test_an_own_kind_of_state_is_refused():
    with pytest.raises(TypeError, match="Paged, Slot, Source"):
        StateSpec({"x": Field((2,))}).bytes(1, 0, "float32")


def test_short_names_of_element_types_are_known_and_wrong_ones_named():
    assert dtype_name("bf16") == "bfloat16"
    assert element_bytes("fp32") == 4
    with pytest.raises(UnknownName, match=r"'flaot32'.*'float32'"):
        element_bytes("flaot32")
