import math

import attn_gated.differential
import pytest
import torch
from attn_core import Rotary, configure
from attn_core.errors import InvalidValue
from attn_testing import Agreement

DIFFERENTIAL = attn_gated.differential.Differential()


def build(options=None, **shared):
    torch.manual_seed(0)
    layer = DIFFERENTIAL.build(configure(DIFFERENTIAL, options, **shared)).double()
    with torch.no_grad():
        layer.inner.norm.weight.copy_(torch.randn_like(layer.inner.norm.weight))
    return layer


def by_loops(layer, rows, heads, groups, size, initial):
    """Equations 1 to 3 of the paper for rows [token, width], causal, with Microsoft's order of heads."""
    query = (rows @ layer.query.weight.T).view(-1, heads, 2, size)
    key = (rows @ layer.key.weight.T).view(-1, 2 * groups, size)
    value = (rows @ layer.value.weight.T).view(-1, groups, 2 * size)
    q1, k1, q2, k2 = layer.inner.lambdas
    share = math.e ** (q1 @ k1) - math.e ** (q2 @ k2) + initial
    out = []
    for token in range(len(rows)):
        for head in range(heads):
            maps = []
            for which in range(2):
                mine = key[: token + 1, (2 * head + which) // (heads // groups)]
                maps.append((mine @ query[token, head, which] / size**0.5).softmax(0))
            read = (maps[0] - share * maps[1]) @ value[: token + 1, head // (heads // groups)]
            normed = read / (read.pow(2).mean() + 1e-5).sqrt() * layer.inner.norm.weight
            out.append(normed * (1 - initial))
    return torch.stack(out).view(len(rows), -1) @ layer.output.weight.T


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_it_equals_a_loop_over_the_equations_forward_and_gradient(record_property, heads, groups):
    layer = build({"depth": 2}, hidden_size=12, num_heads=2 * heads, num_kv_heads=2 * groups, head_dim=3)
    rows = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    expected = by_loops(layer, rows, heads, groups, 3, 0.8 - 0.6 * math.exp(-0.6))
    out = layer(rows[None])[0]
    loops = Agreement(record_property, "differential", paper="equations 1 to 3 in loops")
    loops.outputs(out, expected, 1e-12)
    probe = torch.randn_like(out)
    wanted = [rows, layer.query.weight, layer.value.weight, layer.inner.lambdas, layer.inner.norm.weight]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-11)


def test_it_equals_diffllama_whose_pairs_are_the_halves_of_the_heads(record_property):
    pytest.importorskip("transformers")
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    settings = DiffLlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4, attention_dropout=0.0,
        rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    theirs = DiffLlamaAttention(settings, 3).double()
    ours = build({"depth": 3}, hidden_size=16, num_heads=4, rotary=Rotary())
    adjacent = [0, 2, 1, 3]  # head h of a half is paired with head h of the other half
    with torch.no_grad():
        for mine, name in ((ours.query, "q_proj"), (ours.key, "k_proj"), (ours.value, "v_proj")):
            mine.weight.copy_(getattr(theirs, name).weight.view(4, 4, 16)[adjacent].flatten(0, 1))
        ours.output.weight.copy_(theirs.o_proj.weight)
        ours.inner.lambdas.copy_(torch.stack([theirs.lambda_q1, theirs.lambda_k1, theirs.lambda_q2, theirs.lambda_k2]))
        ours.inner.norm.weight.fill_(1.0)
    rows = torch.randn(2, 7, 16, dtype=torch.float64)
    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turns = DiffLlamaRotaryEmbedding(settings).double()(rows, torch.arange(7)[None])
    oracle = Agreement(record_property, "differential", package="transformers DiffLlamaAttention")
    # Their softmax and their turns are float32.
    oracle.functions(ours, lambda given: theirs(given, turns, mask)[0], rows, tolerance=1e-5)


def test_weights_sum_to_one_minus_lambda():
    layer = build(hidden_size=8, num_heads=4)
    weights = layer.weights(torch.randn(2, 5, 8, dtype=torch.float64))
    assert weights.shape == (2, 2, 5, 5)
    assert torch.allclose(weights.sum(-1), (1 - layer.inner.share()).expand(2, 2, 5), rtol=0, atol=1e-14)


def test_equal_maps_cancel_to_the_share_that_is_not_subtracted():
    layer = build({"lambda_init": 0.5}, hidden_size=8, num_heads=2)
    with torch.no_grad():
        layer.query.weight.zero_()
        layer.inner.lambdas.zero_()
    rows = torch.randn(1, 6, 8, dtype=torch.float64)
    assert torch.allclose(layer.weights(rows)[0, 0, -1], torch.full((6,), 0.5 / 6, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize(("depth", "expected"), [(0, 0.2), (1, 0.3555), (12, 0.7836)])
def test_lambda_starts_higher_in_higher_layers(depth, expected):
    config = configure(DIFFERENTIAL, {"depth": depth}, hidden_size=8, num_heads=2)
    assert attn_gated.differential.lambda_init(config) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "shared", "name"),
    [
        ({}, {"num_heads": 3, "hidden_size": 6}, "num_heads: 3"),
        ({}, {"num_heads": 4, "num_kv_heads": 1}, "num_kv_heads: 1"),
        ({"depth": -1}, {"num_heads": 2}, "depth: -1"),
        ({"lambda_init": 1.5}, {"num_heads": 2}, "lambda_init: 1.5"),
    ],
)
def test_what_cannot_be_subtracted_is_refused_by_name(options, shared, name):
    with pytest.raises(InvalidValue, match=name):
        configure(DIFFERENTIAL, options, **{"hidden_size": 8, **shared})
