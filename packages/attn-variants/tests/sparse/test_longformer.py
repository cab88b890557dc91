"""Longformer's dilated heads, and global tokens that differ from sequence to sequence, in loops over single pairs."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core import Shape, configure, installed
from attn_core.errors import InvalidValue

WIDTH, HEADS, TOKENS = 8, 2, 9


def layer_of(**options):
    mechanism = installed().mechanisms.get("longformer")
    torch.manual_seed(0)
    return mechanism.build(configure(mechanism, options, hidden_size=WIDTH, num_heads=HEADS, causal=False)).double()


def by_loops(layer, rows, window, dilations, tokens, real=None):
    """Section 3 of the paper, pair by pair: `tokens` [batch, token] are global, `real` [batch, token] no padding."""
    size, outs = WIDTH // HEADS, []
    for b in range(len(rows)):
        out = []
        for i in range(rows.shape[1]):
            parts = layer.inner if tokens[b, i] else layer
            for h in range(HEADS):
                cut, d = slice(h * size, (h + 1) * size), dilations[h % len(dilations)]
                seen = [
                    j
                    for j in range(rows.shape[1])
                    if (tokens[b, i] or tokens[b, j] or (abs(i - j) <= window // 2 * d and (i - j) % d == 0))
                    and (real is None or real[b, j])
                ]
                query = parts.query(rows[b, i])[cut]
                scores = [query @ parts.key(rows[b, j])[cut] / math.sqrt(size) for j in seen]
                weights = torch.stack(scores).softmax(0)
                out.append(sum(w * parts.value(rows[b, j])[cut] for w, j in zip(weights, seen, strict=True)))
        outs.append(torch.cat(out).view(-1, WIDTH))
    return layer.output(torch.stack(outs))


def spread(places):
    tokens = torch.zeros(2, TOKENS, dtype=torch.bool)
    for row, at in enumerate(places):
        tokens[row, list(at)] = True
    return tokens


@pytest.mark.parametrize("dilations", [(2,), (1, 3)])
def test_dilated_heads_see_every_so_manyth_position(agrees, dilations):
    layer = layer_of(window=4, dilations=dilations, global_positions=(0, 5))
    rows = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    tokens = spread([(0, 5), (0, 5)])
    expected, paper = by_loops(layer, rows, 4, dilations, tokens), agrees("longformer", paper="section 3, in loops")
    paper.outputs(layer(rows), expected, 1e-12)
    probe = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * probe).sum(), rows)[0] for out in (layer(rows), expected))
    paper.gradients([ours], [theirs], 1e-11)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("places", [((2, 7), (4,)), ((), (1, 2, 8)), ((), ())])
def test_each_sequence_has_its_own_global_tokens(agrees, padded, places):
    layer = layer_of(window=2, dilations=(1, 2), global_positions=(0,))
    rows = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    asked, real = spread(places), torch.arange(TOKENS) < torch.tensor([TOKENS, 6])[:, None] if padded else None
    tokens = asked | spread([(0,), (0,)])
    expected = by_loops(layer, rows, 2, (1, 2), tokens, real)
    paper = agrees("longformer", paper="global tokens of each sequence, in loops")
    out = layer(rows, global_tokens=asked, key_padding_mask=real)
    paper.outputs(out, expected, 1e-12)
    probe = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((made * probe).sum(), rows)[0] for made in (out, expected))
    paper.gradients([ours], [theirs], 1e-11)


def test_the_same_global_tokens_everywhere_are_those_of_the_config():
    fixed, given = layer_of(window=4, global_positions=(0, 3)), layer_of(window=4, global_positions=())
    given.load_state_dict(fixed.state_dict())
    rows, tokens = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), spread([(0, 3), (0, 3)])
    torch.testing.assert_close(given(rows, global_tokens=tokens), fixed(rows), rtol=0, atol=1e-12)
    weights = given.weights(rows, global_tokens=tokens)
    torch.testing.assert_close(weights, fixed.weights(rows), rtol=0, atol=1e-12)


def test_dropped_weights_of_given_global_tokens_are_dropped_in_training():
    mechanism = installed().mechanisms.get("longformer")
    layer = mechanism.build(configure(mechanism, {"window": 2}, hidden_size=8, causal=False, dropout=0.5))
    rows, tokens = torch.randn(1, TOKENS, 8), torch.ones(1, TOKENS, dtype=torch.bool)
    assert not torch.equal(layer(rows, global_tokens=tokens), layer.eval()(rows, global_tokens=tokens))


@pytest.mark.parametrize("tokens", [torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, TOKENS)])
def test_global_tokens_of_another_shape_or_type_are_refused(tokens):
    with pytest.raises(InvalidValue, match=r"global_tokens.*\[batch, token\]"):
        layer_of(window=2)(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), global_tokens=tokens)


def test_a_dilation_does_not_change_what_a_middle_token_costs():
    mechanism, sizes = installed().mechanisms.get("longformer"), {"hidden_size": 8, "causal": False}
    dense, wide = (
        mechanism.cost(
            configure(mechanism, {"window": 4, "dilations": (d,), "global_positions": ()}, **sizes),
            Shape(batch=1, query=400, key=400),
        )
        for d in (1, 2)
    )
    # Dilated windows are cut at both ends twice as far: 2 (1 + 2) pairs against 2 · 2 (1 + 2).
    per_pair = 4 * 8
    assert dense.allowed_flops - wide.allowed_flops == 6 * per_pair


@pytest.mark.parametrize("dilations", [(), (0,), (1.5,)])
def test_dilations_that_are_no_steps_are_refused(dilations):
    with pytest.raises(InvalidValue, match="dilations"):
        layer_of(dilations=dilations)


def test_projections_of_global_tokens_begin_as_copies_and_are_learned_apart(build):
    layer = build("longformer", {"window": 4}, hidden_size=8, num_heads=2, bias=True, causal=False)
    for name in ("query", "key", "value"):
        own, common = getattr(layer.inner, name), getattr(layer, name)
        assert torch.equal(own.weight, common.weight)
        assert own.weight is not common.weight
