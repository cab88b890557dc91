"""The kit's own store, on which the laws of serving stand."""

import pytest
import torch
from attn_core import Field, Paged, Slot

from attn_testing.law import LawBroken, require_same
from attn_testing.memory import RUBBISH, DictionaryStore
from attn_testing.serving import ragged


def test_rows_come_back_by_position_with_rubbish_where_there_is_none():
    store = DictionaryStore({"0": {"kv": Paged({"x": Field((1,))})}})
    store.admit(7)
    store.admit(8)
    batch = ragged([2, 3], [0, 0])
    view = store.view(batch, [7, 8])["0"]["kv"]
    view.append({"x": torch.arange(5.0)[:, None]})
    rows = view.rows([1, 0])
    assert rows.fields["x"][..., 0].tolist() == [[2, 3, 4], [0, 1, RUBBISH]]
    assert rows.key_padding_mask.tolist() == [[True] * 3, [True, True, False]]
    assert rows.positions[0].tolist() == [0, 1, 2]
    assert rows.fields["x"].dtype == torch.float64


def test_a_window_shows_what_its_queries_can_see_and_nothing_older():
    store = DictionaryStore({"0": {"kv": Paged({"x": Field(())}, window=3)}})
    store.admit(0)
    seen = []
    for step, length in enumerate((4, 1, 2)):
        context = sum((4, 1, 2)[:step])
        view = store.view(ragged([length], [context]), [0])["0"]["kv"]
        view.append({"x": torch.arange(context, context + length).double()})
        seen.append(sorted(view.rows([0]).positions[0].tolist()))
    assert seen == [[0, 1, 2, 3], [2, 3, 4], [3, 4, 5, 6]]
    assert store.live_bytes(0, 7) == 3 * 8


def test_a_slot_is_zero_at_first_and_then_what_was_written():
    store = DictionaryStore({"0": {"s": Slot({"x": Field((2,)), "n": Field((), "int64")})}})
    store.admit(0)
    view = store.view(ragged([1], [0]), [0])["0"]["s"]
    assert view.read()["x"].tolist() == [[0, 0]]
    view.write({"x": torch.ones(1, 2), "n": torch.tensor([3])})
    held = store.view(ragged([1], [1]), [0])["0"]["s"].read()
    assert held["x"].tolist() == [[1, 1]]
    assert held["n"].dtype == torch.int64
    store.release(0)
    store.admit(0)
    assert store.view(ragged([1], [0]), [0])["0"]["s"].read()["x"].tolist() == [[0, 0]]


def test_tensors_that_differ_are_told_apart_with_their_place():
    require_same(torch.ones(2, 3), torch.ones(2, 3), "ones", 0)
    for other in (2.5, float("nan"), float("inf")):
        with pytest.raises(LawBroken, match=r"these differ at \(1,\)"):
            require_same(torch.tensor([1.0, other]), torch.tensor([1.0, 2.0]), "these", 1e-3)
