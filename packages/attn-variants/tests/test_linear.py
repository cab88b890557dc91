import pytest
import torch
from attn_core import Shape, configure, installed, state_bytes
from attn_variants.compute.linear import EPSILON, bidirectional, chunked, features, recurrent, with_ones


def operands(tokens=11, heads=2, key_size=3, value_size=4):
    query = features(torch.randn(2, tokens, heads, key_size, dtype=torch.float64))
    key = features(torch.randn(2, tokens, heads, key_size, dtype=torch.float64))
    return query, key, with_ones(torch.randn(2, tokens, heads, value_size, dtype=torch.float64), key)


def by_pairs(query, key, value, causal):
    """Quadratic attention whose scores are products of features."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores.tril() if causal else scores
    weights = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value[..., :-1])


@pytest.mark.parametrize("chunk", [1, 2, 3, 11, 64])
def test_chunks_of_any_size_and_single_tokens_equal_all_pairs(chunk):
    query, key, value = operands()
    expected = by_pairs(query, key, value, causal=True)
    nothing = torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    by_token, after_tokens = recurrent(query, key, value, nothing)
    by_chunk, after_chunks = chunked(query, key, value, None, chunk)
    assert torch.allclose(by_token, expected, rtol=0, atol=1e-13)
    assert torch.allclose(by_chunk, expected, rtol=0, atol=1e-13)
    assert torch.allclose(after_chunks, after_tokens, rtol=0, atol=1e-13)


def test_a_sequence_in_two_parts_equals_the_whole():
    query, key, value = operands()
    first, sums = chunked(query[:, :4], key[:, :4], value[:, :4], None, 3)
    second, _ = chunked(query[:, 4:], key[:, 4:], value[:, 4:], sums, 3)
    assert torch.allclose(torch.cat([first, second], 1), by_pairs(query, key, value, causal=True), rtol=0, atol=1e-13)


def test_without_an_order_every_query_sees_every_key():
    query, key, value = operands()
    assert torch.allclose(
        bidirectional(query, key, value), by_pairs(query, key, value, causal=False), rtol=0, atol=1e-13
    )


def test_features_are_positive_and_at_least_float32():
    rows = torch.linspace(-30, 30, 100).bfloat16()
    assert features(rows).dtype == torch.float32
    assert (features(rows) > 0).all()
    assert torch.equal(features(torch.tensor([0.0, 2.0])), torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("tokens", [10, 1000])
def test_the_state_weighs_the_same_at_any_length(tokens):
    linear = installed().mechanisms.get("linear")
    specs = linear.state(configure(linear, width=32, heads=4))
    assert state_bytes(specs, tokens=tokens, dtype="bfloat16") == 4 * (8 * 8 + 8) * 4


def test_the_price_grows_linearly_with_the_length():
    linear = installed().mechanisms.get("linear")
    config = configure(linear, {"chunk": 64}, width=32, heads=4)
    prices = [linear.cost(config, Shape(query=length, key=length)).flops for length in (640, 1280)]
    assert prices[1] == 2 * prices[0]


def test_a_padded_start_changes_nothing(build):
    layer = build("linear", {"chunk": 3}, width=8, heads=2)
    rows = torch.randn(1, 7, 8, dtype=torch.float64)
    padded = torch.cat([torch.randn(1, 2, 8, dtype=torch.float64), rows], dim=1)
    keep = torch.tensor([[False] * 2 + [True] * 7])
    assert torch.allclose(layer(padded, keep=keep)[:, 2:], layer(rows), rtol=0, atol=1e-13)
