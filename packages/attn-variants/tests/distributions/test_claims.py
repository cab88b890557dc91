"""What the literature says of scores and distributions, computed."""

import math

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, configure, installed
from attn_core.scores import Dot, ScaledDot
from attn_testing.agreement import results
from attn_variants.compute.merging import merged, partial
from attn_variants.compute.plain import attention_weights
from attn_variants.distributions import entmax15, softmax, sparsemax
from torch.nn.functional import scaled_dot_product_attention


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_cl_6_softmax_never_gives_exact_zeros_and_sparse_distributions_do():
    scores = 3 * doubles(200, 32)
    assert (softmax(scores, None) > 0).all()
    zeros = {f.__name__: (f(scores, None) == 0).double().mean().item() for f in (entmax15, sparsemax)}
    assert 0.5 < zeros["entmax15"] < zeros["sparsemax"] < 1


def weights_of(score, queries, keys):
    """Our weights [pairs, 2] of queries [pairs, size] over keys [2 · pairs, size], two for each."""
    size = queries.shape[-1]
    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=size, value_size=size), score=score)
    key = keys.unflatten(0, (-1, 2))[:, :, None]
    return attention_weights(spec, AttentionInputs(query=queries[:, None, None], key=key, value=key))[:, 0, 0]


@pytest.mark.parametrize("size", [4, 64, 512])
@pytest.mark.parametrize("scaled", [False, True])
def test_cl_22_products_of_unit_variance_vectors_have_variance_d_and_scaling_makes_it_one(size, scaled):
    """The logarithm of the ratio of two weights is a difference of scores, whose variance is twice that of one."""
    weights = weights_of(ScaledDot() if scaled else Dot(), doubles(10000, size), doubles(20000, size))
    found = (weights[:, 0] / weights[:, 1]).clamp(1e-300, 1e300).log()
    known = found.abs() < 600
    assert known.double().mean() > 0.999
    assert found[known].var().item() / 2 == pytest.approx(1 if scaled else size, rel=0.06)


def test_cl_44_without_scaling_the_gradients_of_the_softmax_vanish_as_heads_grow():
    norms = {}
    for size in (4, 64, 512):
        query, key = doubles(200, 1, size), doubles(200, 16, size)
        for scale in (1.0, size**-0.5):
            weights = softmax((query * key).sum(-1) * scale, None)
            jacobian = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None, :]
            norms[size, scale == 1.0] = jacobian.flatten(1).norm(dim=-1).mean().item()
    assert norms[4, True] > 1.5 * norms[64, True] > 2.25 * norms[512, True]
    assert norms[512, False] == pytest.approx(norms[64, False], rel=0.1)


def swapped_before_the_last(build, layers):
    """How much the last output of a causal stack without positions changes when two earlier tokens change places."""
    stack = [build("nope", hidden_size=16, num_heads=2) for _ in range(layers)]
    rows = doubles(1, 5, 16)
    outs = []
    for given in (rows, rows[:, [1, 3, 0, 2, 4]]):
        hidden = given
        for layer in stack:
            hidden = hidden + layer(hidden)
        outs.append(hidden[0, -1])
    return (outs[0] - outs[1]).abs().max().item()


def test_cl_24_the_causal_mask_does_not_tell_one_layer_the_order_of_earlier_tokens(build):
    assert swapped_before_the_last(build, layers=1) < 1e-14


def test_cl_24_the_causal_mask_does_tell_two_layers_the_order_of_earlier_tokens(build):
    assert swapped_before_the_last(build, layers=2) > 1e-3


def test_cl_35_the_exponential_overflows_above_709_and_softmax_does_not():
    assert math.exp(709) == 8.218407461554972e307
    with pytest.raises(OverflowError):
        math.exp(710)
    assert math.log(torch.finfo(torch.float64).max) == pytest.approx(709.7827, abs=5e-5)
    scores = torch.tensor([710.0, 0.0], dtype=torch.float64)
    naive = scores.exp() / scores.exp().sum()
    assert naive.isnan().any()
    assert torch.equal(softmax(scores, None), torch.tensor([1.0, math.exp(-710)], dtype=torch.float64))


def test_cl_36_softmax_does_not_see_a_shift_of_its_scores():
    scores = doubles(20, 9)
    assert torch.allclose(softmax(scores, None), softmax(scores - 123.0, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("split", [1, 4, 8])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_cl_36_two_blocks_merge_to_the_softmax_of_the_whole(split, size):
    """What layers over several machines merge, against torch's attention over all keys, forward and gradient."""
    spec = AttentionSpec(heads=Heads(query=2, key_value=2, key_size=4, value_size=3))
    given = [size * doubles(1, 5, 2, 4), doubles(1, 9, 2, 4), doubles(1, 9, 2, 3)]

    def in_blocks(query, key, value):
        parts = [
            partial(spec, AttentionInputs(query=query, key=key[:, block], value=value[:, block]))
            for block in (slice(split), slice(split, None))
        ]
        return merged(*parts).out

    def whole(query, key, value):
        return scaled_dot_product_attention(*(rows.transpose(1, 2) for rows in (query, key, value)))

    found, expected = (results(function, given, []) for function in (in_blocks, whole))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_cl_37_scores_are_symmetric_where_queries_are_keys_and_weights_are_not():
    rows = doubles(7, 4)
    scores = rows @ rows.T
    weights = softmax(scores, None)
    # A product of matrices may add the terms of (i, j) in another order than those of (j, i).
    assert torch.allclose(scores, scores.T, rtol=0, atol=1e-14)
    assert (weights - weights.T).abs().max() > 1e-3
    assert torch.allclose(weights.sum(-1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-15)


def test_cl_49_attention_is_a_fuzzy_hash_table_and_exact_as_the_temperature_falls():
    keys, values = torch.linalg.qr(doubles(6, 6)).Q, doubles(6, 3)
    query = keys[4] + 0.1 * keys[1]
    errors = [
        (softmax(keys @ query / temperature, None) @ values - values[4]).norm().item() for temperature in (1, 0.1, 0.01)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12


@pytest.mark.parametrize("alpha", [1.0, 0.5, -2.0, 100.0, "big", float("nan")])
def test_an_alpha_that_is_no_entmax_is_refused(alpha):
    from attn_core.errors import InvalidValue

    with pytest.raises(InvalidValue, match="alpha"):
        configure(installed().mechanisms.get("entmax"), {"alpha": alpha}, hidden_size=8)
