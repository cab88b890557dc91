"""One recurrence, three ways to compute it."""

import pytest
import torch
from attn_core.kernels.recurrence import Steps
from attn_variants.mechanisms.recurrence_scan import (
    by_doubling,
    chunked,
    effective_weights,
    one_by_one,
    parallel,
    recurrent,
)
from hypothesis import given, settings
from hypothesis import strategies as st

KEY, VALUE, HEADS, BATCH = 3, 4, 2, 2
KINDS = [(decay, delta_rule) for decay in ("none", "head", "channel") for delta_rule in (False, True)]
LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 8, 13, 31])


def draw(tokens, kind, *, strongest=2.0, seed=0):
    """Steps of a kind with keys of length one, in float64; log decays reach down to -`strongest`."""
    decay, delta_rule = kind
    generator = torch.Generator().manual_seed(seed)

    def rows(*size, make=torch.randn):
        return make(BATCH, tokens, HEADS, *size, generator=generator, dtype=torch.float64)

    fades = {"none": None, "head": 1, "channel": KEY}[decay]
    return Steps(
        query=rows(KEY),
        key=torch.nn.functional.normalize(rows(KEY), dim=-1),
        value=rows(VALUE),
        decay=None if fades is None else -strongest * rows(fades, make=torch.rand),
        strength=rows(make=torch.rand) if delta_rule else None,
    )


def piece(steps, start, stop):
    return Steps(*(None if part is None else part[:, start:stop] for part in steps))


def memory(seed=5):
    return torch.randn(BATCH, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@given(kind=st.sampled_from(KINDS), tokens=LENGTHS, chunk=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_token_by_token_all_at_once_and_by_chunks_are_one_function(kind, tokens, chunk, seed):
    steps = draw(tokens, kind, seed=seed)
    out, after = recurrent(steps)
    by_chunks, after_chunks = chunked(steps, None, chunk)
    close(parallel(steps), out)
    close(by_chunks, out)
    close(after_chunks, after)


@given(kind=st.sampled_from(KINDS), tokens=LENGTHS, chunk=st.integers(1, 9), cut=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_sequence_in_two_parts_is_the_whole(kind, tokens, chunk, cut):
    steps, at = draw(tokens, kind), round(cut * tokens)
    whole, after = recurrent(steps, memory())
    first, between = chunked(piece(steps, 0, at), memory(), chunk)
    second, last = chunked(piece(steps, at, tokens), between, chunk)
    close(torch.cat([first, second], dim=1), whole)
    close(last, after)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gradients_of_the_three_forms_are_one(kind):
    found = []
    for form in (lambda s: recurrent(s)[0], parallel, lambda s: chunked(s, None, 4)[0]):
        steps = Steps(*(None if part is None else part.requires_grad_() for part in draw(11, kind)))
        given_parts = [part for part in steps if part is not None]
        found.append(torch.autograd.grad((form(steps) ** 2).sum(), given_parts))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] != "none"], ids=str)
@pytest.mark.parametrize("strongest", [1e-9, 50.0, 1e6])
def test_no_strength_of_decay_overflows(kind, strongest):
    steps = Steps(*(None if p is None else p.requires_grad_() for p in draw(21, kind, strongest=strongest)))
    out, _ = chunked(steps, None, 16)
    torch.testing.assert_close(out, recurrent(steps)[0], rtol=1e-9, atol=1e-9)
    for gradient in torch.autograd.grad(out.sum(), [part for part in steps if part is not None]):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("size", [1, KEY])
def test_a_decay_of_one_is_none(delta_rule, size):
    steps = draw(13, ("none", delta_rule))
    still = steps._replace(decay=torch.zeros(BATCH, 13, HEADS, size, dtype=torch.float64))
    for form in (lambda s: recurrent(s)[0], parallel, lambda s: chunked(s, None, 4)[0]):
        close(form(still), form(steps))


def test_equal_decays_of_all_channels_are_one_decay_of_the_head():
    steps = draw(13, ("head", True))
    assert steps.decay is not None
    each = steps._replace(decay=steps.decay.expand(-1, -1, -1, KEY).contiguous())
    close(chunked(each, None, 8)[0], chunked(steps, None, 8)[0])


def test_without_decay_and_correction_it_is_plain_linear_attention():
    steps = draw(9, ("none", False))
    pairs = torch.einsum("bqhd,bkhd->bhqk", steps.query, steps.key).tril()
    close(chunked(steps, None, 4)[0], torch.einsum("bhqk,bkhd->bqhd", pairs, steps.value))
    close(effective_weights(steps), pairs)


def test_with_strength_one_a_key_replaces_what_the_memory_held_for_it():
    keys = torch.linalg.qr(torch.randn(KEY, KEY, dtype=torch.float64)).Q
    order = [0, 1, 2, 0, 1]
    steps = Steps(
        query=keys[order][None, :, None],
        key=keys[order][None, :, None],
        value=torch.randn(1, 5, 1, VALUE, dtype=torch.float64),
        strength=torch.ones(1, 5, 1, dtype=torch.float64),
    )
    out, after = chunked(steps, None, 4)
    close(out, steps.value)
    held = torch.einsum("kd,dv->kv", keys, after[0, 0])
    close(held, steps.value[0, [3, 4, 2], 0])


def test_with_strength_zero_nothing_is_written():
    steps = draw(9, ("head", True))
    mute = steps._replace(strength=torch.zeros_like(steps.strength))
    out, after = chunked(mute, None, 4)
    assert not out.any()
    assert not after.any()


def test_a_padded_token_changes_nothing():
    for kind in KINDS:
        steps = draw(8, kind)
        key_padding_mask = torch.tensor([True, False, True, True, False, False, True, True]).expand(BATCH, -1)
        real = Steps(*(None if part is None else part[:, key_padding_mask[0]] for part in steps))
        out, after = chunked(steps.kept(key_padding_mask), None, 3)
        expected, expected_after = recurrent(real)
        close(out[:, key_padding_mask[0]], expected)
        close(after, expected_after)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize(("product", "size"), [(torch.mul, 1), (torch.matmul, KEY)])
def test_doubling_finds_the_prefixes_that_one_by_one_finds(chunks, product, size):
    transition = torch.randn(1, chunks, HEADS, KEY, size, dtype=torch.float64)
    own = torch.randn(BATCH, chunks, HEADS, KEY, VALUE, dtype=torch.float64)
    close(by_doubling(transition, own, product), one_by_one(transition, own, product))


@pytest.mark.parametrize("kind", [("none", False), ("channel", False), ("head", True)])
def test_an_exported_graph_computes_sequences_of_other_lengths(kind):
    class Recurrence(torch.nn.Module):
        def forward(self, *parts):
            given = iter(parts)
            return chunked(Steps(*(None if part is None else next(given) for part in draw(1, kind))), None, 4)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    sample = tuple(part for part in draw(5, kind) if part is not None)
    program = torch.export.export(Recurrence(), sample, dynamic_shapes={"parts": tuple({1: tokens} for _ in sample)})
    for length in (2, 23):
        steps = draw(length, kind, seed=length)
        out, after = program.module()(*(part for part in steps if part is not None))
        close(out, recurrent(steps)[0])
        close(after, recurrent(steps)[1])
