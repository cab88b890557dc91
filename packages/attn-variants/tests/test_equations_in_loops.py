"""Mechanisms whose spec is compared with its parts elsewhere, here with the equation of the paper alone.

Nothing is read from a layer but its weights: masks, scales, caps and angles are written out from the options that the
test itself gives, so a wrong spec shows.
"""

from __future__ import annotations

import math

import pytest
import torch

WIDTH, HEADS, TOKENS, SOURCE = 16, 4, 9, 7
SIZE = WIDTH // HEADS


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def moved(layer):
    """The layer with no weight left at zero or one."""
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return layer


def heads_of(linear, rows, count=HEADS):
    """[tokens, count, size] of rows [tokens, width]."""
    return (rows @ linear.weight.T).view(len(rows), count, -1)


def softmax(energies):
    return torch.softmax(energies, 0)


def attended(layer, rows, score, seen, memory=None, *, groups=1, share=softmax):
    """Shares, by default the softmax, over keys with `seen(i, j)` of `score(q, k, head, i, j)`, query by query."""
    memory = rows if memory is None else memory
    query, value = heads_of(layer.query, rows), heads_of(layer.value, memory, HEADS // groups)
    key = value if layer.key is None else heads_of(layer.key, memory, HEADS // groups)
    out = []
    for i in range(len(rows)):
        for head in range(HEADS):
            places = [j for j in range(len(memory)) if seen(i, j)]
            energies = torch.stack([score(query[i, head], key[j, head // groups], head, i, j) for j in places])
            out.append(share(energies) @ value[places, head // groups])
    return torch.stack(out).view(len(rows), WIDTH) @ layer.output.weight.T


def past(i, j):
    return j <= i


def scaled(query, key, head, i, j):
    return query @ key / math.sqrt(SIZE)


def concatenated(layer):
    """v · tanh(W [k; q] + b): Luong et al. 2015, the third row of equation 8, with a bias."""
    weights = layer.score

    def score(query, key, head, i, j):
        weight = torch.cat([weights.key_weight[head], weights.query_weight[head]])
        return weights.vector[head] @ torch.tanh(torch.cat([key, query]) @ weight + weights.bias[head])

    return score, past


def bilinear(layer):
    """q W k: Luong et al. 2015, the second row of equation 8."""
    weight = layer.score.weight
    return lambda query, key, head, i, j: query @ weight[head] @ key, past


def by_table(layer):
    """q·k/√d + b of the head and the distance j - i, cut off at 3: Raffel et al. 2020 with a bias for each distance."""
    table = layer.modifiers["relative_bias"].table
    return lambda query, key, head, i, j: scaled(query, key, head, i, j) + table[min(max(j - i, -3), 3) + 3, head], past


def by_angle(layer):
    """β cos(q, k) with β = log(1 + exp b): Graves et al. 2014, equations 5 and 6, for heads."""
    beta = torch.log1p(torch.exp(layer.score.sharpness))
    return lambda query, key, head, i, j: beta[head] * (query @ key) / (query.norm() * key.norm() + 1e-8), past


def by_place(layer):
    """(W q) at the place of the key: Luong et al. 2015, equation 9."""
    return lambda query, key, head, i, j: layer.score.weight[head, j] @ query, past


CASES = {
    "concat": (None, concatenated),
    "cosine": (None, by_angle),
    "general": (None, bilinear),
    "location": ({"longest": TOKENS + 2}, by_place),
    "relative_bias": ({"clip": 3}, by_table),
}


@pytest.mark.parametrize("name", CASES)
def test_a_score_is_that_of_its_paper_and_the_mask_is_the_past(build, agrees, name):
    options, equation = CASES[name]
    layer = moved(build(name, options, hidden_size=WIDTH, num_heads=HEADS))
    score, seen = equation(layer)
    oracle = agrees(name, paper="the equation in loops, from the weights alone")
    oracle.functions(
        lambda rows: layer(rows[None])[0],
        lambda rows: attended(layer, rows, score, seen),
        doubles(TOKENS, WIDTH),
        weights=[(weight, weight) for weight in layer.parameters()],
        tolerance=1e-11,
    )


def test_sigmoid_attention_weighs_each_key_alone(build, agrees):
    """Ramapuram et al. 2024: the logistic function of q·k/√d - ln n over the n keys that are seen."""
    layer = moved(build("sigmoid", hidden_size=WIDTH, num_heads=HEADS))
    oracle = agrees("sigmoid", paper="the equation in loops, from the weights alone")
    oracle.functions(
        lambda rows: layer(rows[None])[0],
        lambda rows: attended(layer, rows, scaled, past, share=lambda e: 1 / (1 + torch.exp(math.log(len(e)) - e))),
        doubles(TOKENS, WIDTH),
        weights=[(weight, weight) for weight in layer.parameters()],
        tolerance=1e-12,
    )


def test_hard_attention_takes_the_value_of_the_largest_product(build, agrees):
    layer = moved(build("hard", hidden_size=WIDTH, num_heads=HEADS))

    def by_loops(rows):
        query, key, value = (heads_of(linear, rows) for linear in (layer.query, layer.key, layer.value))
        best = [
            [max(range(i + 1), key=lambda j, i=i, h=head: (query[i, h] @ key[j, h]).item()) for head in range(HEADS)]
            for i in range(len(rows))
        ]
        chosen = [torch.cat([value[best[i][head], head] for head in range(HEADS)]) for i in range(len(rows))]
        return torch.stack(chosen) @ layer.output.weight.T

    oracle = agrees("hard", paper="the value of the largest product, in loops")
    oracle.functions(lambda rows: layer(rows[None])[0], by_loops, doubles(TOKENS, WIDTH), tolerance=1e-12)


def test_local_m_looks_around_the_place_of_the_step(build, agrees):
    """Luong et al. 2015, section 3.2: p_t = t, scores `general`, keys within D of it."""
    layer = moved(build("local_m", {"radius": 2}, hidden_size=WIDTH, num_heads=HEADS))
    weight = layer.score.weight

    def by_loops(rows, source):
        return attended(
            layer, rows, lambda q, k, head, i, j: q @ weight[head] @ k, lambda i, j: abs(i - j) <= 2, source
        )

    oracle = agrees("local_m", paper="section 3.2 in loops, from the weights alone")
    oracle.functions(
        lambda rows, source: layer(rows[None], source[None])[0],
        by_loops,
        doubles(SOURCE, WIDTH),
        doubles(SOURCE, WIDTH),
        tolerance=1e-12,
    )


def gemma_by_loops(layer, options, *, groups, base=None):
    """Gemma 2 and 3: normed heads, turned halves, a scale, a cap and a window, each if its option is given; Llama 4:
    chunks, and a temperature that grows with the query's position."""
    eps, cap, window = options.get("norm_eps", 1e-6), options.get("cap"), options.get("window")
    chunk = options.get("chunk")
    scale = options.get("scale", SIZE**-0.5)

    def normed(head, gain):
        return head if eps is None else gain * head / torch.sqrt(head.square().mean() + eps)

    def turned(head, place):
        if base is None:
            return head
        angles = torch.tensor([place * base ** (-2 * n / SIZE) for n in range(SIZE // 2)], dtype=torch.float64)
        one, two = head[: SIZE // 2], head[SIZE // 2 :]
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()])

    def gain(name):
        return None if eps is None else getattr(layer.norm, name)

    def score(query, key, head, i, j):
        one, two = turned(normed(query, gain("query_gain")), i), turned(normed(key, gain("key_gain")), j)
        energy = scale * (one @ two)
        energy = energy if cap is None else cap * torch.tanh(energy / cap)
        return energy * (
            1 + options.get("temperature", 0) * math.log(1 + (i + 1) // options.get("temperature_floor", 1))
        )

    def seen(i, j):
        return j <= i < j + (window or i + 1) and (chunk is None or i // chunk == j // chunk)

    return lambda rows: attended(layer, rows, score, seen, groups=groups)


GEMMAS = {
    "gemma 3, local": ({"window": 3, "base": 10_000.0}, 10_000.0),
    "gemma 3, global": ({"scale": 0.3, "base": 1_000_000.0}, 1_000_000.0),
    "gemma 2": ({"norm_eps": None, "cap": 1.5, "window": 4}, 500.0),
    "everything": ({"norm_eps": 1e-3, "cap": 0.7, "window": 5, "scale": 2.0}, 500.0),
    "no positions": ({"cap": 2.0}, None),
    "llama 4, chunks": ({"chunk": 3}, 500.0),
    "llama 4, all tokens": ({"norm_eps": None, "temperature": 0.7, "temperature_floor": 2}, None),
}


@pytest.mark.parametrize("case", GEMMAS)
def test_gemma_computes_what_its_reports_say_with_each_of_its_options(build, agrees, case):
    from attn_core import Rotary

    options, base = GEMMAS[case]
    rotary = None if base is None else Rotary(base=500.0)
    layer = moved(build("gemma", options, hidden_size=WIDTH, num_heads=HEADS, num_kv_heads=2, rotary=rotary))
    oracle = agrees("gemma", paper="the reports' equations in loops, from the weights alone")
    oracle.functions(
        lambda rows: layer(rows[None])[0],
        gemma_by_loops(layer, options, groups=2, base=base),
        doubles(TOKENS, WIDTH),
        weights=[(weight, weight) for weight in layer.parameters()],
        tolerance=1e-11,
    )


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_gemma_is_gemma_3_in_transformers(build, agrees, kind):
    from attn_core import Rotary
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RotaryEmbedding

    config = Gemma3TextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        sliding_window=3,
        layer_types=[kind],
        query_pre_attn_scalar=5,
        attn_implementation="eager",
    )
    local = kind == "sliding_attention"
    options = {"scale": 5**-0.5, "base": 10_000.0 if local else 1_000_000.0} | ({"window": 3} if local else {})
    layer = build("gemma", options, hidden_size=32, num_heads=4, num_kv_heads=2, rotary=Rotary())
    peer = Gemma3Attention(config, 0).double().eval()
    with torch.no_grad():
        for part, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            getattr(layer, part).weight.copy_(getattr(peer, f"{theirs}_proj").weight)
        for gain, norm in ((layer.norm.query_gain, peer.q_norm), (layer.norm.key_gain, peer.k_norm)):
            gain.copy_(1 + norm.weight.normal_())
    rows = doubles(2, TOKENS, 32)
    turns = Gemma3RotaryEmbedding(config)(rows, torch.arange(TOKENS)[None], kind)
    apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    allowed = (apart >= 0) & (apart < (3 if local else TOKENS))
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~allowed, float("-inf"))[None, None]
    # transformers norms, turns and takes the softmax in float32, whatever the rows are.
    oracle = agrees("gemma", package="transformers Gemma3Attention")
    oracle.functions(layer, lambda given: peer(given, turns, mask)[0], rows, tolerance=1e-5)
