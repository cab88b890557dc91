from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import Causal, Full, Window
from attn_core.distributions import Softmax, SoftmaxOne, SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_core.masks import BigBird, Predicate, Prefix, Segments, Strided
from attn_core.modifiers import Alibi, RelativeBias, SoftCap, T5Bias
from attn_kernels_triton.attention import backward, forward, tiles
from attn_kernels_triton.attention.attend import attend, attend_with_lse
from attn_kernels_triton.attention.forward import copied
from attn_kernels_triton.attention.plan import plan_of
from calls import Call, require_right, results

HALF, BRAIN = torch.float16, torch.bfloat16
LONG = {"queries": 130, "keys": 150}

CALLS = {
    "full": Call(Full()),
    "causal": Call(Causal(), **LONG),
    "causal, bfloat16": Call(Causal(), dtype=BRAIN, **LONG),
    "causal, float16 with outliers": Call(Causal(), dtype=HALF, outliers=True),
    "as many queries as keys": Call(Causal(), 64, 64, heads=(4, 2)),
    "one query": Call(Causal(), 1, 70),
    "one key": Call(Full(), 5, 1),
    "one of each": Call(Causal(), 1, 1, batch=3),
    "sizes that are no powers of two": Call(Causal(), 20, 20, sizes=(5, 24)),
    "wide keys, narrow values": Call(Causal(), sizes=(80, 16), dtype=BRAIN),
    "one head for all": Call(Full(), heads=(3, 1), batch=2),
    "window": Call(Window(left=20), **LONG),
    "window to both sides": Call(Window(left=3, right=40), **LONG),
    "window of causal": Call(Causal() & Window(left=9, right=4), 70, 70),
    "soft cap": Call(Causal(), modifiers=(SoftCap(cap=1.5),)),
    "alibi": Call(Causal(), modifiers=(Alibi(),), heads=(3, 3)),
    "soft cap and alibi of a window": Call(Window(left=9), modifiers=(SoftCap(cap=3.0), Alibi())),
    "relative biases": Call(Causal(), modifiers=(RelativeBias(clip=5),)),
    "relative biases over both sides": Call(Full(), 50, 70, modifiers=(RelativeBias(clip=40),), heads=(3, 3)),
    "biases of T5": Call(Causal(), modifiers=(T5Bias(),), **LONG),
    "biases of T5 over both sides": Call(Full(), modifiers=(T5Bias(buckets=8, max_distance=20, bidirectional=True),)),
    "all biases, bfloat16": Call(
        Causal(), 70, 70, dtype=BRAIN, modifiers=(SoftCap(cap=2.0), RelativeBias(clip=1), Alibi(), T5Bias())
    ),
    "biases of a window with sinks": Call(
        Window(left=40, right=3), 70, 70, modifiers=(RelativeBias(clip=9),), distribution=SoftmaxWithSink(), batch=2
    ),
    "biases of a list": Call(Causal() | Prefix(40), 70, 100, modifiers=(T5Bias(buckets=8, max_distance=30),)),
    "biases of heads that differ": Call(
        BigBird(block=16, random=1, number_of_heads=2), 70, 80, modifiers=(RelativeBias(clip=3),)
    ),
    "sinks": Call(Causal(), distribution=SoftmaxWithSink(), batch=2),
    "softmax one of a window": Call(Window(left=5), distribution=SoftmaxOne()),
    "prefix": Call(Causal() | Prefix(70), 100, 140),
    "packed documents": Call(Causal() & Segments((30, 1, 0, 50, 20)), 101, 101),
    "strides": Call(Strided(3), 70, 70),
    "a function": Call(Predicate(lambda query, key: (query + key) % 3 != 1), 40, 50),
    "nothing but a corner": Call(Predicate(lambda query, key: (query < 3) & (key < 2)), 70, 70),
    "heads that differ": Call(BigBird(block=16, random=1, number_of_heads=2), 70, 80, distribution=SoftmaxWithSink()),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_are_as_close_to_float64_as_the_plain_computation(name):
    require_right(attend, CALLS[name])


@pytest.mark.parametrize(
    "call",
    [
        Call(Full(), 33, 70, dtype=BRAIN, heads=(4, 2), batch=2),
        Call(Causal(), 40, 70, dtype=HALF, sizes=(24, 16)),
        Call(Window(left=9, right=4), 70, 101, dtype=HALF, distribution=SoftmaxWithSink()),
    ],
    ids=lambda call: call.mask.kind,
)
def test_bands_whose_tiles_the_chip_copies_are_as_right(monkeypatch, call):
    for width in tiles.DENSE_CHOICES:
        monkeypatch.setitem(tiles.DENSE_CHOICES, width, tiles.Choice(32, 32, 4, 1, "descriptors"))
    monkeypatch.delitem(forward.PROGRAMS, "pointers")
    require_right(attend, call)


@pytest.fixture
def small_backward(monkeypatch):
    """Small tiles for the backward programs of bands."""
    small = tiles.Choice(16, 32, 4, 1, "descriptors")
    for shipped in (tiles.DENSE_BACKWARD, tiles.DENSE_BACKWARD_BOUNDED):
        monkeypatch.setitem(shipped, 64, (small, small))
    monkeypatch.delattr(backward, "pointer_launches")


BANDS = [
    Call(Full(), 33, 70, dtype=BRAIN, heads=(4, 2), batch=2),
    Call(Causal(), 40, 70, dtype=HALF, sizes=(24, 16)),
    Call(Causal(), 40, 40, dtype=HALF, distribution=SoftmaxWithSink()),
    Call(Window(left=9, right=4), 70, 101, dtype=HALF, distribution=SoftmaxWithSink()),
    Call(Full(), 1, 1, dtype=HALF),
]


@pytest.mark.usefixtures("small_backward")
@pytest.mark.parametrize("call", BANDS, ids=lambda call: f"{call.mask.kind}, {call.queries}, {call.keys}")
def test_gradients_of_bands_whose_tiles_the_chip_copies_are_as_right(call):
    require_right(attend, call)


@pytest.mark.usefixtures("small_backward")
def test_keys_that_do_not_exist_change_no_gradient_however_low_all_logits_are():
    call = Call(Full(), 5, 33, dtype=HALF)
    operands = call.operands()
    low = dataclasses.replace(operands, query=operands.query + 20, key=operands.key / 8 - 20)
    require_right(attend, call, low)


@pytest.mark.usefixtures("small_backward")
def test_queries_of_bands_that_see_nothing_get_no_gradient_and_give_none():
    call, few = Call(Causal(), 50, 20, dtype=HALF), Call(Causal(), 20, 20, dtype=HALF)
    operands = call.operands()
    found = results(attend, call.spec, operands)
    exact = results(attend, few.spec, dataclasses.replace(operands, query=operands.query[:, 30:]))
    assert not found["gradient to query"][:, :30].any()
    assert all(one.isfinite().all() for one in (*found.values(), *exact.values()))


def test_of_no_rows_at_all_there_are_no_gradients():
    found = results(attend, (call := Call(Causal(), 20, 20, dtype=HALF, batch=0)).spec, call.operands())
    assert all(tensor.numel() == 0 for tensor in found.values())


def test_tensors_that_the_copier_cannot_read_are_read_by_threads():
    call = Call(Causal(), 40, 40, dtype=HALF)
    operands = call.operands()
    shifted = torch.cat([operands.key.new_zeros(1), operands.key.flatten()])[1:].view_as(operands.key)
    broadcast = operands.value[:, :1].expand_as(operands.value)
    plan = plan_of(call.spec, operands)
    assert copied(plan, operands.query, operands.key, operands.value)
    assert not copied(plan, operands.query, shifted, operands.value)
    assert not copied(plan, operands.query, operands.key, broadcast)
    odd = dataclasses.replace(operands, key=shifted)
    torch.testing.assert_close(attend(call.spec, odd), attend(call.spec, operands), rtol=1e-3, atol=1e-3)


def test_tiles_that_would_be_larger_than_the_blocks_of_a_list_compute_the_same(monkeypatch):
    for name in tiles.CHOICES:
        monkeypatch.setitem(tiles.CHOICES, name, tiles.Choice(128, 128, 4, 1))
    require_right(attend, Call(Causal() | Prefix(70), 100, 140, dtype=HALF))


@pytest.mark.parametrize("mask", [Causal(), Window(left=6), Strided(2)], ids=lambda mask: mask.kind)
def test_padded_keys_are_seen_by_nobody(mask):
    call = Call(mask, 40, 40, batch=3, distribution=Softmax())
    key_padding_mask = torch.arange(40) < torch.tensor([[40], [17], [0]])
    require_right(attend, call, call.operands(key_padding_mask=key_padding_mask))


@pytest.mark.parametrize("mask", [Causal(), Window(left=5), Prefix(7), Strided(2)], ids=lambda mask: mask.kind)
def test_explicit_positions_are_used_for_masks_and_biases(mask):
    call = Call(mask, 3, 9, batch=2, modifiers=(Alibi(),))
    query = torch.tensor([[12, 13, 14], [4, 5, 6]])
    key = torch.stack([torch.arange(9).roll(4) + 6, torch.arange(9).flip(0)])
    key_padding_mask = torch.arange(9) < torch.tensor([[9], [7]])
    require_right(
        attend, call, call.operands(query_positions=query, key_positions=key, key_padding_mask=key_padding_mask)
    )


def test_heads_before_rows_and_slices_of_a_larger_tensor_are_read_in_place():
    call = Call(Causal(), 40, 40)
    operands = call.operands()
    turned = {name: getattr(operands, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key")}
    sliced = torch.cat([operands.value, operands.value], dim=-1)[..., :16]
    again = dataclasses.replace(operands, **turned, value=sliced)
    assert torch.equal(attend(call.spec, again), attend(call.spec, operands))


def test_gradients_are_the_same_bit_for_bit_each_time():
    call = Call(Window(left=9), 70, 70, dtype=BRAIN, heads=(4, 1))
    first, second = (results(attend, call.spec, call.operands()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_order_of_keys_does_not_matter_where_all_are_seen():
    call = Call(Full(), 20, 70)
    operands, order = call.operands(), torch.randperm(70, generator=torch.Generator().manual_seed(1))
    turned = dataclasses.replace(operands, key=operands.key[:, order], value=operands.value[:, order])
    torch.testing.assert_close(attend(call.spec, turned), attend(call.spec, operands), rtol=1e-5, atol=1e-6)


def test_attention_over_halves_of_the_keys_is_one_by_their_lse():
    call = Call(Full(), 20, 70)
    operands = call.operands()
    whole, lse = attend_with_lse(call.spec, operands)
    pieces = [
        attend_with_lse(
            call.spec, dataclasses.replace(operands, key=operands.key[:, part], value=operands.value[:, part])
        )
        for part in (slice(0, 31), slice(31, 70))
    ]
    sums = torch.stack([piece[1] for piece in pieces])
    torch.testing.assert_close(sums.logsumexp(0), lse)
    shares = (sums - lse).exp().transpose(2, 3)[..., None]
    torch.testing.assert_close(sum(share * piece[0] for share, piece in zip(shares, pieces, strict=True)), whole)


def test_more_queries_than_keys_stand_before_all_of_them():
    call, few = Call(Causal(), 9, 3), Call(Causal(), 3, 3)
    operands = call.operands()
    last = dataclasses.replace(operands, query=operands.query[:, 6:])
    found = results(attend, call.spec, operands)
    torch.testing.assert_close(attend(few.spec, last), found["output"][:, 6:], rtol=1e-5, atol=1e-6)
    assert not found["gradient to query"][:, :6].any()


def test_where_nothing_is_seen_the_output_is_zero_and_lse_minus_infinity():
    call = Call(Causal(), 9, 3)
    out, lse = attend_with_lse(call.spec, call.operands())
    assert not out[:, :6].any()
    assert (lse[:, :, :6] == float("-inf")).all()
    assert lse[:, :, 6:].isfinite().all()


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 5, 1), (5, 0, 1), (0, 0, 2)])
def test_of_nothing_comes_nothing(queries, keys, batch):
    call = Call(Causal(), queries, keys, batch=batch, distribution=SoftmaxWithSink())
    found = results(attend, call.spec, call.operands())
    assert found["output"].shape == (batch, queries, 2, 16)
    assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": torch.zeros(1, 4, 1, 16, dtype=torch.float64)}, "key.dtype"),
        ({"key": torch.zeros(1, 4, 1, 16, dtype=BRAIN)}, "key.dtype"),
        ({"key": torch.zeros(1, 4, 1, 16, device="meta")}, "key.device"),
        ({"value": torch.zeros(1, 4, 1, 16, device="meta")}, "value.device"),
        ({"key_padding_mask": torch.ones(1, 4, dtype=torch.bool, device="meta")}, "key_padding_mask.device"),
        ({"parameters": {"distribution.logit": torch.zeros(2, device="meta")}}, "distribution.logit.device"),
        ({"key": torch.zeros(1, 4, 2, 16)}, "key"),
        ({"value": torch.zeros(1, 5, 1, 16)}, "value"),
        ({"value": torch.zeros(1, 4, 16, 1).transpose(2, 3)}, None),
        ({"value": torch.zeros(1, 4, 1, 32)[..., ::2]}, "value.stride"),
        ({"query": torch.zeros(1, 4, 2)}, "query"),
        ({"key_padding_mask": torch.ones(1, 5, dtype=torch.bool)}, "key_padding_mask"),
        ({"key_positions": torch.zeros(2, 4, dtype=torch.int64)}, "key_positions"),
        (
            {
                "query": torch.empty(2**30 * 3 + 16, dtype=HALF, device="meta").as_strided(
                    (1, 4, 2, 16), (0, 2**30, 0, 1)
                )
            },
            "query",
        ),
        ({"parameters": {}}, "parameters"),
    ],
)
def test_what_programs_would_misread_is_refused_before_they_start(change, said):
    call = Call(Causal(), 4, 4, distribution=SoftmaxWithSink())
    operands = dataclasses.replace(call.operands(), **change)
    if said is None:
        assert attend(call.spec, operands).isfinite().all()
        return
    with pytest.raises(InvalidValue, match=rf"^{said}"):
        attend(call.spec, operands)
