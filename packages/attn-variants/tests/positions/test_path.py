"""Queries reflected by every token between them and the key."""

import importlib.metadata
import importlib.util
import itertools
import math

import pytest
import torch
from attn_core import Heads, Rotary
from attn_core.errors import Incompatible, InvalidValue
from attn_variants.mechanisms.path_layer import Householder, path_scores
from torch.nn.functional import silu

TOKENS = 11


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def reflections(inner, rows):
    """H_t of every token [tokens, size, size] of each key/value head, from the rows [tokens, width], one by one."""
    heads = inner.spec.heads
    raw = rows @ inner.down.weight.T @ inner.up.weight.T
    strength = 2 * torch.sigmoid(rows @ inner.strength.weight.T + inner.strength.bias)
    taps = inner.convolution.taps
    found = []
    for g, t in itertools.product(range(heads.key_value), range(len(rows))):
        own = slice(g * heads.key_size, (g + 1) * heads.key_size)
        seen = [raw[t - back, own] * inner.convolution.weight[own, taps - 1 - back] for back in range(min(taps, t + 1))]
        w = silu(sum(seen))
        w = w / (w @ w + 1e-6).sqrt()
        found.append(torch.eye(heads.key_size, dtype=rows.dtype) - strength[t, g] * torch.outer(w, w))
    return torch.stack(found).view(heads.key_value, len(rows), heads.key_size, heads.key_size)


def by_loops(layer, rows):
    """Equation 2 of Yang et al. 2025 of rows [tokens, width]: every path is walked token by token."""
    query, key, value = (part[0] for part in layer.project(rows[None], None))
    turns, heads, forget = reflections(layer.inner, rows), layer.spec.heads, layer.inner.forget
    gates = torch.ones(len(rows), heads.query) if forget is None else torch.sigmoid(forget(rows))
    out = []
    for i, h in itertools.product(range(len(rows)), range(heads.query)):
        g, scores, turned, faded = h // (heads.query // heads.key_value), {}, query[i, h], 0.0
        for j in reversed(range(i + 1)):
            scores[j] = (turned @ key[j, g] + faded) / math.sqrt(heads.key_size)
            faded = faded + gates[j, h].log()
            turned = turns[g, j] @ turned
        weights = torch.softmax(torch.stack([scores[j] for j in range(i + 1)]), 0)
        out.append(weights @ value[: i + 1, g])
    return layer.output(torch.stack(out).view(len(rows), -1))


@pytest.mark.parametrize("sizes", [{"num_heads": 2}, {"num_heads": 4, "num_kv_heads": 2}], ids=str)
@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("forget_gate", [False, True])
def test_outputs_and_gradients_are_those_of_paths_walked_token_by_token(build, agrees, sizes, block, forget_gate):
    layer = build("path", {"rank": 5, "block": block, "forget_gate": forget_gate}, hidden_size=16, **sizes)
    rows, upstream = doubles(TOKENS, 16), doubles(TOKENS, 16)
    found, expected = layer(rows[None])[0], by_loops(layer, rows)
    oracle = agrees("path", paper="paths of reflections, token by token")
    oracle.outputs(found, expected, 1e-12)
    weights = list(layer.parameters())
    oracle.gradients(*(torch.autograd.grad(out, weights, upstream) for out in (found, expected)), 1e-10)


@pytest.mark.parametrize("tokens", [1, 4, 7, 8, 33])
@pytest.mark.parametrize("padded", [False, True])
def test_whole_sequences_by_blocks_are_those_of_all_pairs_and_so_are_gradients(build, tokens, padded):
    layer = build("path", {"rank": 5, "block": 4}, hidden_size=16, num_heads=4, num_kv_heads=2)
    rows = doubles(2, tokens, 16)
    key_padding_mask = torch.rand(2, tokens) > 0.3 if padded else None
    value = layer.project_kv(rows)["value"].repeat_interleave(2, dim=2)
    expected = layer.output(
        torch.einsum("bhqk,bkhd->bqhd", layer.weights(rows, key_padding_mask=key_padding_mask), value).flatten(-2)
    )
    found, weights = layer(rows, key_padding_mask=key_padding_mask), list(layer.parameters())
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    upstream = doubles(*found.shape)
    grads = [torch.autograd.grad(out, weights, upstream, retain_graph=True) for out in (found, expected)]
    assert all(torch.allclose(*pair, rtol=0, atol=1e-11) for pair in zip(*grads, strict=True))


def test_tokens_that_reflect_nothing_leave_attention_without_positions(build, agrees):
    layer, nope = build("path", {"block": 4}, hidden_size=16, num_heads=2), build("nope", hidden_size=16, num_heads=2)
    with torch.no_grad():
        layer.inner.strength.bias.fill_(-1e3)
    nope.load_state_dict({name: part for name, part in layer.state_dict().items() if "inner" not in name})
    rows = doubles(2, 9, 16)
    agrees("path", identity="no reflections: nope").outputs(layer(rows), nope(rows), 1e-12)


def test_tokens_on_the_way_change_what_a_query_gives_to_a_key(build):
    layer = build("path", {"taps": 1}, hidden_size=16, num_heads=1)
    rows = doubles(1, 8, 16)
    other = rows.clone()
    other[:, 4] += 1
    logits = [layer.weights(given)[0, 0].log() for given in (rows, other)]
    apart = [each[7] - each[7, 6] for each in logits]
    assert torch.allclose(apart[0][5:], apart[1][5:])
    assert (apart[0][:4] - apart[1][:4]).abs().min() > 1e-6


def test_a_query_alone_is_turned_as_it_is_among_others():
    heads = Heads(query=2, key_value=1, key_size=3, value_size=3)
    query, key, unit = (
        doubles(1, 2, 9, 3),
        doubles(1, 1, 9, 3),
        torch.nn.functional.normalize(doubles(1, 1, 9, 3), dim=-1),
    )
    paths, places = Householder(unit, torch.rand(1, 1, 9, dtype=torch.float64) * 2), torch.arange(9)[None]
    whole = path_scores(heads, query, key, paths, places, 4)
    for place in range(9):
        alone = path_scores(heads, query[:, :, place : place + 1], key, paths, places[:, place : place + 1], 4)
        assert torch.allclose(alone[0, :, 0, : place + 1], whole[0, :, place, : place + 1], rtol=0, atol=1e-13)


def test_rotary_positions_are_refused_and_so_is_looking_ahead(build):
    with pytest.raises(Incompatible, match="path"):
        build("path", hidden_size=16, num_heads=2, rotary=Rotary())
    with pytest.raises(InvalidValue, match="path"):
        build("path", hidden_size=16, num_heads=2, causal=False)


@pytest.mark.parametrize("option", ["rank", "taps", "block"])
def test_sizes_below_one_are_refused(build, option):
    with pytest.raises(InvalidValue, match=rf"mechanism 'path'.*{option}"):
        build("path", {option: 0}, hidden_size=16, num_heads=2)


@pytest.mark.oracle
def test_scores_along_paths_are_those_of_fla(agrees):
    place = importlib.metadata.distribution("fla-core").locate_file("fla/ops/path_attn/naive.py")
    found = importlib.util.spec_from_file_location("fla_naive_path_attn", place)
    peer = importlib.util.module_from_spec(found)
    found.loader.exec_module(peer)
    heads, tokens = Heads(query=4, key_value=2, key_size=8, value_size=8), 40
    query, key, value = (torch.randn(2, tokens, count, 8, requires_grad=True) for count in (4, 2, 2))
    unit = torch.nn.functional.normalize(torch.randn(2, tokens, 2, 8), dim=-1).requires_grad_()
    strength = (torch.rand(2, tokens, 2) * 2).requires_grad_()
    given = [query, key, value, unit, strength]
    zeros = torch.zeros(2, tokens, 4)
    theirs = peer.naive_path_attn(query, key, value, unit, strength, zeros, scale=8**-0.5, chunk_size=16)
    by_head = [part.transpose(1, 2) for part in (query, key, value, unit)]
    paths = Householder(by_head[3], strength.transpose(1, 2))
    scores = path_scores(heads, by_head[0] * 8**-0.5, by_head[1], paths, torch.arange(tokens)[None], 8)
    ahead = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    ours = (weights @ by_head[2].repeat_interleave(2, dim=1)).transpose(1, 2)
    # The oracle knows float32 only.
    oracle = agrees("path", package="fla-core naive_path_attn")
    oracle.outputs(ours, theirs, 1e-4)
    probe = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    oracle.gradients(*(torch.autograd.grad((out * probe).sum(), given) for out in (ours, theirs)), 1e-3)
