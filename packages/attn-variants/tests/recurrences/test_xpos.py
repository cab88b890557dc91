"""Retention with xPos: pairs of channels that turn, and fade each at its own rate."""

import math

import pytest
import torch
from attn_core import Rotary, Shape, configure, installed
from attn_core.errors import InvalidValue
from attn_variants.mechanisms.recurrence_layers import Places, Projections
from attn_variants.mechanisms.recurrence_scan import chunked, parallel, recurrent
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

WIDTH, HEADS, SIZE, TOKENS, SCALE = 16, 2, 8, 11, 3.0


def made(build, options=None, **shared):
    return build(
        "retnet", {"chunk": 4, "scale_base": SCALE, **(options or {})}, hidden_size=WIDTH, num_heads=HEADS, **shared
    )


def rows(tokens=TOKENS):
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def projected(layer, given):
    return [linear(given).unflatten(-1, (HEADS, -1)) for linear in (layer.query, layer.key, layer.value)]


def loops(layer, given, pairs):
    """Outputs by complex numbers, pair by pair: (q_1 + i q_2) ζ^(n/S) e^(inθ) times the conjugate of the key's."""
    query, key, value = (part.detach() for part in projected(layer, given))
    out = torch.zeros_like(value)
    for batch in range(given.shape[0]):
        for head in range(HEADS):
            for n in range(given.shape[1]):
                for m in range(n + 1):
                    score = 0.0
                    for p, (first, second) in enumerate(pairs):
                        scale = (p / (SIZE / 2) + 0.4) / 1.4
                        angle = 10000.0 ** (-2 * p / SIZE)
                        q = complex(query[batch, n, head, first], query[batch, n, head, second])
                        k = complex(key[batch, m, head, first], key[batch, m, head, second])
                        q *= scale ** (n / SCALE) * complex(math.cos(n * angle), math.sin(n * angle))
                        k *= scale ** (-m / SCALE) * complex(math.cos(m * angle), math.sin(m * angle))
                        score += (q * k.conjugate()).real
                    fade = (1 - 2.0 ** (-5 - head)) ** (n - m)
                    out[batch, n, head] += fade * score / SIZE**0.5 * value[batch, m, head]
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return layer.output(silu(layer.gate(given)) * out.flatten(-2))


@pytest.mark.parametrize("interleaved", [True, False])
def test_retention_with_xpos_is_the_loop_of_the_paper(agrees, build, interleaved):
    layer = made(build, rotary=None if interleaved else Rotary())
    side_by_side = [(2 * p, 2 * p + 1) for p in range(SIZE // 2)]
    halves = [(p, p + SIZE // 2) for p in range(SIZE // 2)]
    expected = loops(layer, rows(), side_by_side if interleaved else halves)
    oracle = agrees("retnet", paper="xPos, pair by pair in complex numbers")
    oracle.outputs(layer(rows()), expected, 1e-12)


def test_token_by_token_all_at_once_and_by_chunks_are_one_function(build):
    steps, _ = made(build).read(rows(), None, None)
    steps = type(steps)(*(None if part is None else part.detach() for part in steps))
    out, after = recurrent(steps)
    by_chunks, last = chunked(steps, None, 4)
    for ours, expected in ((parallel(steps), out), (by_chunks, out), (last, after)):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_scores_depend_on_distances_only_and_far_positions_overflow_nothing(build):
    layer = made(build).float()
    given = rows(6).float()
    at = torch.arange(6)[None]
    places = (Places(at + first, 2**17) for first in (0, 10**5))
    near, far = (chunked(layer._steps(Projections(layer, given), place, None, None)[0], None, 4)[0] for place in places)
    assert torch.isfinite(layer(rows(600).float())).all()
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-4)


def test_elements_that_are_not_turned_fade_with_the_head_alone(build):
    layer = made(build, rotary=Rotary(fraction=0.5))
    decay = layer.read(rows(), None, None)[0].decay[0, 0]
    head = torch.tensor([1 - 2.0**-5, 1 - 2.0**-6], dtype=torch.float64).log()
    torch.testing.assert_close(decay[:, 4:], head[:, None].expand(-1, 4), rtol=1e-14, atol=0)
    pairs = torch.tensor([0.4 / 1.4, 0.9 / 1.4], dtype=torch.float64).log() / SCALE
    torch.testing.assert_close(decay[:, :4], head[:, None] + pairs.repeat(2), rtol=1e-13, atol=0)


def test_a_scale_base_beyond_all_lengths_is_retention_without_it(build, agrees):
    layer, plain = made(build, {"scale_base": 1e18}), made(build, {"scale_base": None})
    plain.load_state_dict(layer.state_dict())
    agrees("retnet", identity="xPos whose scales are one").outputs(layer(rows()), plain(rows()), 1e-12)
    near = made(build)
    near.load_state_dict(layer.state_dict())
    assert not torch.allclose(near(rows()), plain(rows()))


@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_counted_flops_are_the_declared_ones(tokens):
    mechanism = installed().mechanisms.get("retnet")
    config = configure(mechanism, {"chunk": 4, "scale_base": 512.0}, hidden_size=WIDTH, num_heads=HEADS)
    with FlopCounterMode(display=False) as counter:
        mechanism.build(config)(torch.randn(2, tokens, WIDTH))
    assert mechanism.cost(config, Shape(batch=2, query=tokens, key=tokens)).flops == counter.get_total_flops()


@pytest.mark.parametrize("wrong", [0.0, -512.0, math.inf, math.nan, True])
def test_a_scale_base_that_is_no_number_of_tokens_is_refused(build, wrong):
    with pytest.raises(InvalidValue, match="scale_base"):
        made(build, {"scale_base": wrong})


def test_xpos_without_turned_pairs_is_refused(build):
    with pytest.raises(InvalidValue, match=r"scale_base.*give a base"):
        made(build, {"base": None})
    assert made(build, {"base": None}, rotary=Rotary())(rows()).shape == (2, TOKENS, WIDTH)


@pytest.mark.oracle
def test_scores_are_those_of_xpos_elsewhere(agrees, build):
    from rotary_embedding_torch import RotaryEmbedding

    layer = made(build, {"scale_base": 512.0})
    given = rows()
    query, key, _ = projected(layer, given)
    turn = RotaryEmbedding(SIZE, use_xpos=True, xpos_scale_base=512, cache_if_possible=False).double()
    query, key = turn.rotate_queries_and_keys(query.transpose(1, 2), key.transpose(1, 2))
    scores = query @ key.transpose(-1, -2) / SIZE**0.5
    distances = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    rates = 1 - torch.exp2(-5.0 - torch.arange(HEADS, dtype=torch.float64))
    expected = (scores * rates[:, None, None] ** distances).tril()
    oracle = agrees("retnet", package="rotary-embedding-torch xPos")
    oracle.outputs(layer.weights(given), expected, 1e-6)
