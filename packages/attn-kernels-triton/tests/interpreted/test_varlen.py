from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Window
from attn_core.distributions import SoftmaxOne, SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import Varlen, texts
from attn_core.masks import Segments, Strided
from attn_core.modifiers import Alibi, RelativeBias, SoftCap, T5Bias
from attn_kernels_triton.attention.attend import attend, attend_with_lse
from attn_kernels_triton.attention.plan import plan_of
from attn_testing import oracle
from bounds import require_close, roundings_of
from calls import Call, results, wide

BRAIN = torch.bfloat16
SAME = Varlen.of((40, 1, 0, 33, 7))
APART = Varlen((5, 0, 33, 1, 20, 3), (40, 9, 33, 60, 7, 0))
"""Queries fewer than keys, none, as many, one, more, and some without any key."""


def text_by_text(spec: AttentionSpec, operands: AttentionInputs) -> torch.Tensor:
    """The definition: each text alone."""
    return torch.cat([alone(spec, text) for text in texts(operands)], 1)


def alone(spec: AttentionSpec, text: AttentionInputs) -> torch.Tensor:
    """One text, queries of which may stand before all keys."""
    queries, keys = text.query.shape[1], text.key.shape[1]
    if not keys or not queries:
        return text.query.new_zeros(text.query.shape[0], queries, spec.heads.query, spec.heads.value_size)
    places = torch.arange(keys - queries, keys)[None]
    return oracle.attend(spec, dataclasses.replace(text, query_positions=places))


def packed_call(varlen: Varlen, mask=None, **parts) -> tuple[Call, AttentionInputs]:
    call = Call(mask or Causal(), sum(varlen.queries), sum(varlen.keys), **parts)
    return call, call.operands(varlen=varlen)


CALLS = {
    "causal": packed_call(SAME),
    "causal, bfloat16": packed_call(SAME, dtype=BRAIN),
    "full": packed_call(SAME, Full(), heads=(3, 1)),
    "queries and keys of different number": packed_call(APART),
    "the same, seen both ways": packed_call(APART, Full(), dtype=BRAIN),
    "window with sinks": packed_call(SAME, Window(left=9), distribution=SoftmaxWithSink()),
    "window to both sides": packed_call(APART, Window(left=3, right=20)),
    "soft cap and alibi": packed_call(SAME, modifiers=(SoftCap(cap=2.0), Alibi())),
    "relative biases": packed_call(APART, Full(), modifiers=(RelativeBias(clip=7),)),
    "biases of T5, two rows": packed_call(SAME, modifiers=(T5Bias(buckets=8, max_distance=20),), batch=2),
    "softmax one, two rows": packed_call(SAME, distribution=SoftmaxOne(), batch=2),
    "sizes that are no powers of two": packed_call(SAME, sizes=(20, 24), heads=(4, 2)),
    "a mask that is no band": packed_call(SAME, Causal() & Strided(3)),
    "one text": packed_call(Varlen.of((50,))),
    "tokens that are texts": packed_call(Varlen.of((1,) * 37)),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", CALLS)
def test_packed_texts_are_attended_as_each_alone(name):
    call, operands = CALLS[name]
    exact, plain = results(text_by_text, call.spec, wide(operands)), results(text_by_text, call.spec, operands)
    for what, found in results(attend, call.spec, operands).items():
        require_close(found, plain[what], exact[what], f"{name}: {what}", roundings_of(what))


def test_a_text_computes_the_same_to_the_bit_in_any_company():
    call, operands = packed_call(Varlen.of((33, 40, 20)), dtype=BRAIN)
    alone = dataclasses.replace(
        operands, **{name: getattr(operands, name)[:, 33:73] for name in ("query", "key", "value")}, varlen=None
    )
    together, single = results(attend, call.spec, operands), results(attend, call.spec, alone)
    assert torch.equal(together["output"][:, 33:73], single["output"])


def test_padded_keys_of_packed_texts_are_seen_by_nobody():
    call, operands = packed_call(SAME)
    key_padding_mask = (torch.arange(call.keys) % 7 != 3)[None]
    operands = dataclasses.replace(operands, key_padding_mask=key_padding_mask)
    exact, plain = results(text_by_text, call.spec, wide(operands)), results(text_by_text, call.spec, operands)
    for what, found in results(attend, call.spec, operands).items():
        require_close(found, plain[what], exact[what], what, roundings_of(what))


@pytest.mark.sweep(lambda lengths, queries, keys: lengths)
@pytest.mark.parametrize("lengths", [(30, 1, 0, 50, 20), (30, 20), (90, 60), ()], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(101, 101), (60, 101), (101, 60)])
def test_masks_of_segments_are_computed_as_packed_texts(lengths, queries, keys):
    call = Call(Causal() & Segments(lengths), queries, keys)
    operands = call.operands()
    assert plan_of(call.spec, operands).lists is None
    exact, plain = results(alone, call.spec, wide(operands)), results(alone, call.spec, operands)
    for what, found in results(attend, call.spec, operands).items():
        require_close(found, plain[what], exact[what], what, roundings_of(what))


def test_halves_of_the_keys_of_each_text_merge_by_their_lse():
    varlen = Varlen((5, 9, 3), (40, 33, 2))
    call, operands = packed_call(varlen, Full())
    whole, lse = attend_with_lse(call.spec, operands)
    sums, outs = [], []
    for half in (0, 1):
        kept = [range(length)[half::2] for length in varlen.keys]
        firsts = [0, 40, 73]
        numbers = torch.tensor([first + key for first, keys in zip(firsts, kept, strict=True) for key in keys])
        part = dataclasses.replace(
            operands,
            key=operands.key[:, numbers],
            value=operands.value[:, numbers],
            varlen=Varlen(varlen.queries, tuple(map(len, kept))),
        )
        out, sum_ = attend_with_lse(call.spec, part)
        outs.append(out)
        sums.append(sum_)
    torch.testing.assert_close(torch.stack(sums).logsumexp(0), lse)
    shares = [(part - lse).exp().transpose(1, 2)[..., None] for part in sums]
    torch.testing.assert_close(sum(share * out for share, out in zip(shares, outs, strict=True)), whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"varlen": Varlen.of((40, 40))}, "varlen.queries"),
        ({"varlen": Varlen((81,), (80,))}, "varlen.keys"),
        ({"query_positions": torch.arange(81)[None]}, "positions"),
    ],
)
def test_texts_that_are_not_all_rows_are_refused(change, said):
    call, operands = packed_call(SAME)
    with pytest.raises(InvalidValue, match=f"^{said}"):
        attend(call.spec, dataclasses.replace(operands, **change))


@pytest.mark.parametrize("given", [((1,), (1, 2)), ((-1,), (3,))])
def test_texts_of_no_length_are_refused(given):
    with pytest.raises(InvalidValue, match=r"^varlen"):
        Varlen(*given)
