"""What is kept in few bits: coded once, the same for everybody, and as light as is said."""

from __future__ import annotations

import pytest
import torch
from attn_cache import Float16Cache, Int4Cache, Int8Cache, Kivi4Cache, KiviCache, KiviLayout, SharedCache
from attn_core import Field, Paged, Slot
from attn_core.errors import InvalidValue
from attn_core.stores import StoreSize
from hypothesis import given, settings
from hypothesis import strategies as st
from remembered import ragged

BLOCK = 16
SHORT_KIVI = KiviCache(KiviLayout(block=BLOCK, group=8))
FAMILIES = [Float16Cache(), Int8Cache(), Int4Cache(), SHORT_KIVI, Kivi4Cache(KiviLayout(bits=4, block=BLOCK, group=4))]
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
KV = {"layer": {"kv": Paged({"key": Field((2, 8)), "value": Field((2, 8))})}}
MIXED = {
    "mla": {"latent": Paged({"latent": Field((24,)), "rotary_key": Field((8,))})},
    "near": {"kv": Paged({"key": Field((2, 6)), "value": Field((2, 6))}, window=20)},
    "exact": {"kv": Paged({"code": Field((4,), "int64"), "wide": Field((5,), "float64"), "one": Field(())})},
    "sums": {"s": Slot({"s": Field((2, 2))})},
}


def draw(specs, tokens: int, generator: torch.Generator):
    return {
        (layer, state): {
            name: torch.randn(tokens, *field.shape, generator=generator).to(getattr(torch, field.dtype or "float32"))
            for name, field in spec.fields.items()
        }
        for layer, states in specs.items()
        for state, spec in states.items()
        if isinstance(spec, Paged)
    }


def step(store, name: int, context: int, rows, take: slice):
    """Append these rows of every state; the views."""
    length = take.stop - take.start
    assert store.reserve(name, context + length)
    views = store.view(ragged([length], [context]), [name])
    for (layer, state), fields in rows.items():
        views[layer][state].append({field: x[take] for field, x in fields.items()})
    return views


@EVERY
def test_history_is_never_coded_again_and_errors_do_not_compound(family):
    store = family.create(KV, StoreSize(tokens=512, requests=1))
    rows = draw(KV, 400, torch.Generator().manual_seed(0))
    store.admit(1)
    coded: dict[int, torch.Tensor] = {}
    for context in range(400):
        views = step(store, 1, context, rows, slice(context, context + 1))
        seen = views["layer"]["kv"].rows([0])
        for field in ("key", "value"):
            truth, read = rows["layer", "kv"][field], seen.fields[field][0]
            off = (read - truth[: context + 1]).abs().max()
            assert off <= family.loss * truth[: context + 1].abs().max()
        whole = context // BLOCK * BLOCK
        now = seen.fields["key"][0, :whole]
        for block in range(whole // BLOCK):
            piece = now[block * BLOCK : (block + 1) * BLOCK]
            # From the first time it is read as codes, a number never changes by a single bit.
            assert torch.equal(coded.setdefault(block, piece.clone()), piece)
    assert len(coded) == 399 // BLOCK


@EVERY
def test_the_unfinished_block_of_kivi_is_read_as_it_was_written_and_other_rows_are_not(family):
    store = family.create(KV, StoreSize(tokens=64, requests=1))
    rows = draw(KV, 40, torch.Generator().manual_seed(1))
    store.admit(1)
    step(store, 1, 0, rows, slice(0, 39))
    read = step(store, 1, 39, rows, slice(39, 40))["layer"]["kv"].rows([0]).fields["key"][0]
    same = (read == rows["layer", "kv"]["key"]).flatten(1).all(1)
    assert same[32:].all() == isinstance(family, KiviCache)
    assert not same[:32].any()


@EVERY
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_how_a_prompt_was_cut_into_steps_cannot_be_seen_where_the_store_has_its_say(family, cuts, seed):
    total = sum(cuts)
    rows = draw(MIXED, total + 1, torch.Generator().manual_seed(seed))
    read = []
    for plan in (cuts, [total]):
        store = family.create(MIXED, StoreSize(tokens=512, requests=2))
        store.admit(1)
        done = 0
        for wanted in plan:
            end = done + wanted
            while done < end:
                length = store.chunk(done, end - done, 0)
                step(store, 1, done, rows, slice(done, done + length))
                done += length
        views = step(store, 1, total, rows, slice(total, total + 1))
        read.append([views[layer][state].rows([0]) for layer, state in rows])
    for one, other in zip(*read, strict=True):
        for field, numbers in one.fields.items():
            assert torch.equal(numbers, other.fields[field])
        assert torch.equal(one.positions, other.positions)


@EVERY
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_tensors_weigh_what_the_family_says_for_latents_windows_and_exact_fields_too(family, lengths):
    store = family.create(MIXED, StoreSize(tokens=512, requests=1))
    rows = draw(MIXED, sum(lengths), torch.Generator().manual_seed(0))
    store.admit(1)
    done = 0
    for length in lengths:
        step(store, 1, done, rows, slice(done, done + length))
        done += length
        assert store.live_bytes(1, done) == family.bytes(MIXED, tokens=done, dtype="float32")


@EVERY
def test_fields_with_an_element_type_of_their_own_and_single_numbers_are_kept_exactly(family):
    store = family.create(MIXED, StoreSize(tokens=64, requests=1))
    rows = draw(MIXED, 40, torch.Generator().manual_seed(3))
    store.admit(1)
    step(store, 1, 0, rows, slice(0, 39))
    seen = step(store, 1, 39, rows, slice(39, 40))["exact"]["kv"].rows([0]).fields
    for name, truth in rows["exact", "kv"].items():
        assert torch.equal(seen[name][0], truth)
        assert seen[name].dtype == truth.dtype


@EVERY
def test_requests_that_begin_alike_hold_the_same_codes(family):
    store = family.create(KV, StoreSize(tokens=256, requests=2))
    rows = draw(KV, 41, torch.Generator().manual_seed(4))
    tokens = list(range(40))
    store.admit(1)
    step(store, 1, 0, rows, slice(0, 40))
    store.remember(1, tokens, 40, "")
    held = store.usage().tokens
    store.admit(2)
    assert store.adopt(2, tokens, "") == 32
    assert store.usage().tokens == held
    step(store, 2, 32, rows, slice(32, 40))
    one, two = (step(store, name, 40, rows, slice(40, 41))["layer"]["kv"].rows([0]).fields["value"] for name in (1, 2))
    assert torch.equal(one, two)
    store.release(1)
    store.release(2)
    assert store.usage().tokens == 0


@pytest.mark.parametrize(
    "family", [Int8Cache(), Int4Cache(), KiviCache(), Kivi4Cache()], ids=lambda family: family.name
)
def test_a_full_store_of_codes_weighs_less_than_one_of_rows_by_what_is_promised(family):
    size = StoreSize(tokens=4096, requests=4, dtype="bfloat16")
    specs = {"layer": {"kv": Paged({"key": Field((3, 64)), "value": Field((3, 64))})}}
    share = family.room(specs, size) / SharedCache().room(specs, size)
    assert share < {"int8": 0.52, "int4": 0.32, "kivi": 0.33, "kivi4": 0.52}[family.name]


def test_cl_55_codes_weigh_what_a_calculation_by_hand_gives():
    specs = {"layer": {"kv": Paged({"key": Field((3, 64)), "value": Field((3, 64))})}}
    assert Float16Cache().bytes(specs, tokens=10, dtype="float32") == 10 * 2 * 3 * 64 * 2
    # Three heads of 64 codes and a float16 scale each; 32 bytes of codes and two groups of two float16 each.
    assert Int8Cache().bytes(specs, tokens=10, dtype="bfloat16") == 10 * 2 * 3 * (64 + 2)
    assert Int4Cache().bytes(specs, tokens=10, dtype="bfloat16") == 10 * 2 * 3 * (32 + 2 * 2 * 2)


def test_kivi_weighs_what_the_papers_formula_gives():
    heads, size, group, block, bits, tokens = 3, 64, 32, 128, 2, 1000
    specs = {"layer": {"kv": Paged({"key": Field((heads, size)), "value": Field((heads, size))})}}
    whole, rest = tokens // block * block, tokens % block
    # 2 G d [(n - r) bits / 8 + 2 b (n - r) / g + 2 r], b = 2 bytes of a step or a lowest number.
    formula = 2 * heads * size * (whole * bits // 8 + 2 * 2 * whole // group + 2 * rest)
    assert KiviCache().bytes(specs, tokens=tokens, dtype="bfloat16") == formula
    assert KiviCache().layout == KiviLayout(bits=bits, group=group, block=block)


@EVERY
def test_wrong_rows_are_refused_under_the_names_that_the_mechanism_knows(family):
    store = family.create(KV, StoreSize(tokens=64, requests=1))
    store.admit(1)
    store.reserve(1, 3)
    view = store.view(ragged([3], [0]), [1])["layer"]["kv"]
    with pytest.raises(InvalidValue, match=r"layer\.kv\.key.*\(3, 2, 8\)"):
        view.append({"key": torch.zeros(3, 2, 5), "value": torch.zeros(3, 2, 8)})
    with pytest.raises(InvalidValue, match=r"layer\.kv.*'key', 'value'"):
        view.append({"key.codes": torch.zeros(3, 2, 8)})


@EVERY
@pytest.mark.parametrize("context", [7, 16, 21, 39])
def test_a_copy_of_a_request_reads_what_a_request_of_its_own_would_read(family, context):
    ours, theirs = (draw(KV, 60, torch.Generator().manual_seed(seed)) for seed in (5, 6))
    mixed = {
        state: {name: torch.cat([ours[state][name][:context], x[context:]]) for name, x in fields.items()}
        for state, fields in theirs.items()
    }
    forked = family.create(KV, StoreSize(tokens=512, requests=3))
    forked.admit(1)
    for at in range(context):
        step(forked, 1, at, ours, slice(at, at + 1))
    assert forked.fork(1, 2, context)
    alone = family.create(KV, StoreSize(tokens=512, requests=3))
    for name, rows in ((1, ours), (2, mixed)):
        alone.admit(name)
        for at in range(60):
            seen = step(alone, name, at, rows, slice(at, at + 1))
            if at >= context:
                view = step(forked, name, at, rows, slice(at, at + 1))["layer"]["kv"].rows([0])
                for field, numbers in seen["layer"]["kv"].rows([0]).fields.items():
                    assert torch.equal(view.fields[field], numbers)
    forked.release(1)
    forked.release(2)
    assert forked.usage().tokens == 0


@EVERY
@pytest.mark.parametrize(("done", "back"), [(10, 7), (17, 15), (35, 31), (40, 33), (50, 2)])
def test_rows_that_were_taken_back_leave_no_trace(family, done, back):
    wrong, right = (draw(KV, 60, torch.Generator().manual_seed(seed)) for seed in (7, 8))
    kept = {
        state: {name: torch.cat([x[:back], wrong[state][name][back:]]) for name, x in fields.items()}
        for state, fields in right.items()
    }
    stores = [family.create(KV, StoreSize(tokens=512, requests=1)) for _ in range(2)]
    for store in stores:
        store.admit(1)
    for at in range(done):
        step(stores[0], 1, at, kept, slice(at, at + 1))
    start = stores[0].rewind(1, back)
    assert start <= back
    assert start == back or (isinstance(family, KiviCache) and start % BLOCK == 0)
    for at in range(60):
        seen = step(stores[1], 1, at, right, slice(at, at + 1))
        if at >= start:
            again = step(stores[0], 1, at, right, slice(at, at + 1))
            for field, numbers in seen["layer"]["kv"].rows([0]).fields.items():
                assert torch.equal(again["layer"]["kv"].rows([0]).fields[field], numbers)
