"""Requests whose whole blocks are codes leave a store as bytes, with the rows of the unfinished block as they are."""

from __future__ import annotations

import pytest
import torch
from attn_cache import Kivi4Cache, KiviCache, KiviLayout, SharedCache
from attn_core import Field, Paged, Slot
from attn_core.errors import StateInvalid, WrongState
from attn_core.stores import StoreSize
from leaving import header_of
from remembered import ragged
from safetensors.torch import load

SIZE = StoreSize(tokens=96, requests=3)
SPECS = {
    "full": {"kv": Paged({"key": Field((2, 8)), "value": Field((2, 8))})},
    "near": {"kv": Paged({"key": Field((2, 8)), "count": Field((2,), "int64")}, window=21)},
    "sums": {"total": Slot({"z": Field((2,))})},
}
FAMILIES = pytest.mark.parametrize(
    "family",
    [KiviCache(KiviLayout(block=8, group=4)), Kivi4Cache(KiviLayout(bits=4, block=4, group=2))],
    ids=lambda family: family.name,
)


def rows_of(layer: str, tokens: int) -> dict[str, torch.Tensor]:
    fields = SPECS[layer]["kv"].fields
    torch.manual_seed(tokens)
    return {
        name: torch.arange(2 * tokens).view(tokens, 2) if field.dtype else torch.randn(tokens, *field.shape)
        for name, field in fields.items()
    }


def step(store, name: int, context: int, length: int):
    """What a step of so many tokens sees, layer by layer, after it has written its own."""
    assert store.reserve(name, context + length)
    views = store.view(ragged([length], [context]), [name])
    seen = {}
    for layer in ("full", "near"):
        whole = rows_of(layer, 90)
        views[layer]["kv"].append({field: rows[context : context + length] for field, rows in whole.items()})
        seen[layer] = views[layer]["kv"].rows([0])
    views["sums"]["total"].write({"z": torch.full((1, 2), float(context))})
    return seen


def grown(family, tokens: int, name: int = 1):
    """A store with a request of so many tokens, each computed alone."""
    store = family.create(SPECS, SIZE)
    store.admit(name)
    for at in range(tokens):
        step(store, name, at, 1)
    return store


@FAMILIES
@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 29, 50])
def test_what_was_moved_is_read_with_the_same_bits_and_goes_on_so(family, tokens):
    """Now and for every token after, until more blocks have become codes."""
    here, there = grown(family, tokens), family.create(SPECS, SIZE)
    for other in (5, 6):  # places and pages are not those it had
        there.admit(other)
        step(there, other, 0, 3)
    there.release(5)
    assert there.restore(9, here.export(1, tokens)) == tokens
    for at in range(tokens, tokens + 20):
        mine, theirs = step(here, 1, at, 1), step(there, 9, at, 1)
        for layer, seen in mine.items():
            assert torch.equal(seen.positions, theirs[layer].positions)
            for field, rows in seen.fields.items():
                key_padding_mask = slice(None) if seen.key_padding_mask is None else seen.key_padding_mask[0]
                assert torch.equal(rows[0][key_padding_mask], theirs[layer].fields[field][0][key_padding_mask])
    there.release(9)
    there.release(6)
    assert (there.usage().tokens, there.usage().requests) == (0, 0)


@FAMILIES
@pytest.mark.parametrize("tokens", [1, 8, 13, 20])
def test_the_bytes_are_those_of_the_formula(family, tokens):
    """Within the window: codes of whole blocks and the rows after them, nothing else."""
    exported = grown(family, tokens).export(1, tokens)
    formula = family.bytes(SPECS, tokens=tokens, dtype="float32")
    assert len(exported) - header_of(exported)[0] == formula
    assert "full/kv/key.codes" in load(exported)
    assert load(exported)["full/kv.newest/key"].shape[0] == tokens % family.layout.block


@FAMILIES
def test_a_window_leaves_with_what_it_shows_alone(family):
    """Blocks wholly behind it stay behind."""
    block, rows = family.layout.block, load(grown(family, 50).export(1, 50))
    first = 50 - 21 + 1
    assert len(rows["near/kv/key.codes"]) == 50 // block - first // block
    assert len(rows["full/kv/key.codes"]) == 50 // block


@FAMILIES
def test_equal_states_have_equal_bytes(family):
    """However a prompt was cut, and whoever wrote before."""
    one, other = grown(family, 21), family.create(SPECS, SIZE)
    other.admit(3)
    step(other, 3, 0, 2)
    other.admit(1)
    for at in range(0, 21, 4):
        step(other, 1, at, min(4, 21 - at))
    one.view(ragged([1], [20]), [1])["sums"]["total"].write({"z": torch.full((1, 2), 20.0)})
    assert one.export(1, 21) == other.export(1, 21)


@FAMILIES
def test_blocks_go_to_a_store_of_the_same_layout_alone(family):
    """Bits, groups and blocks are in the fingerprint; a store of plain rows has no use for codes."""
    exported = grown(family, 13).export(1, 13)
    for other in (
        KiviCache(KiviLayout(block=16, group=4)),
        Kivi4Cache(KiviLayout(bits=4, block=8, group=4)),
        SharedCache(),
    ):
        store = other.create(SPECS, SIZE)
        with pytest.raises(StateInvalid, match=r"state (full|near)/kv"):
            store.restore(1, exported)
        assert store.usage().requests == 0


@FAMILIES
def test_rows_that_are_codes_by_now_or_not_computed_cannot_be_exported(family):
    """As many tokens as are computed can be had, and those at the end of any whole block."""
    store = grown(family, 21)
    block = family.layout.block
    assert store.reserve(1, 25)  # what is behind the unfinished block is given up when room is asked for
    with pytest.raises(WrongState, match="22 tokens"):
        store.export(1, 22)
    with pytest.raises(WrongState, match="quantized already"):
        store.export(1, block + 1)
