import pytest
import torch
from attn_core import Shape, configure, installed, state_bytes
from attn_variants.mechanisms.linear_layers import EPSILON, features


def by_pairs(layer, rows):
    """Quadratic attention whose scores are products of elu(x) + 1, from the layer's weights."""
    query, key, value = (
        linear(rows).unflatten(-1, (layer.heads.query, -1)) for linear in (layer.query, layer.key, layer.value)
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", torch.nn.functional.elu(query) + 1, torch.nn.functional.elu(key) + 1)
    scores = scores.tril() if layer.causal else scores
    weights = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    return layer.output(torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(-2)), weights


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 3, 11, 64])
def test_sums_of_features_equal_all_pairs(build, agrees, chunk, causal):
    layer = build("linear", {"chunk": chunk}, hidden_size=8, num_heads=2, causal=causal)
    rows = torch.randn(2, 11, 8, dtype=torch.float64)
    pairs = agrees("linear", paper="equations 4 to 7 over all pairs")
    pairs.functions(layer, lambda given: by_pairs(layer, given)[0], rows, tolerance=1e-12)
    pairs.outputs(layer.weights(rows), by_pairs(layer, rows)[1], 1e-13)


def test_features_are_positive_and_at_least_float32():
    rows = torch.linspace(-30, 30, 100).bfloat16()
    assert features(rows).dtype == torch.float32
    assert (features(rows) > 0).all()
    assert torch.equal(features(torch.tensor([0.0, 2.0])), torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("tokens", [10, 1000])
def test_the_state_weighs_the_same_at_any_length(tokens):
    linear = installed().mechanisms.get("linear")
    specs = linear.state(configure(linear, hidden_size=32, num_heads=4))
    assert state_bytes(specs, tokens=tokens, dtype="bfloat16") == 4 * (8 * 8 + 8) * 4


def test_the_price_grows_linearly_with_the_length():
    linear = installed().mechanisms.get("linear")
    config = configure(linear, {"chunk": 64}, hidden_size=32, num_heads=4)
    prices = [linear.cost(config, Shape(query=length, key=length)).flops for length in (640, 1280)]
    assert prices[1] == 2 * prices[0]


def test_a_padded_start_changes_nothing(build):
    layer = build("linear", {"chunk": 3}, hidden_size=8, num_heads=2)
    rows = torch.randn(1, 7, 8, dtype=torch.float64)
    padded = torch.cat([torch.randn(1, 2, 8, dtype=torch.float64), rows], dim=1)
    key_padding_mask = torch.tensor([[False] * 2 + [True] * 7])
    assert torch.allclose(layer(padded, key_padding_mask=key_padding_mask)[:, 2:], layer(rows), rtol=0, atol=1e-13)
