"""The recurrences against independent implementations."""

import importlib.metadata
import importlib.util

import pytest
import torch
from attn_core import configure, installed
from attn_variants.recurrences import favor
from attn_variants.recurrences.chunked import chunked
from attn_variants.recurrences.parallel import effective_weights
from attn_variants.recurrences.steps import Steps

pytestmark = pytest.mark.oracle

BATCH, TOKENS, HEADS, KEY, VALUE = 2, 64, 3, 5, 4


def naive(operation):
    """The plain torch functions of an operation of fla-core; importing the package itself needs triton."""
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(size, seed, make=torch.randn):
    return make(BATCH, TOKENS, HEADS, size, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture
def steps():
    return Steps(rows(KEY, 0), rows(KEY, 1), rows(VALUE, 2))


def fading(size):
    """Log decays down to -1, [batch, tokens, heads, size]."""
    return rows(size, 3, lambda *shape, generator: -torch.rand(*shape, generator=generator))


def by_head(part):
    return part.transpose(1, 2)


def same(steps, expected):
    """Outputs and all gradients, in float32: the oracles know no other type."""
    ours = chunked(steps, None, 16)[0]
    given = [part for part in steps if part is not None]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    probe = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    for one, other in zip(
        torch.autograd.grad((ours * probe).sum(), given),
        torch.autograd.grad((expected * probe).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_linear_attention(steps):
    same(steps, naive("linear_attn").naive_chunk_linear_attn(*steps[:3], scale=1.0))


def test_retention(steps):
    from attn_variants.recurrences.layers.retnet import log_retention

    decay = log_retention(HEADS, steps.key)[None, None].expand(1, TOKENS, -1, 1)
    ours = chunked(steps._replace(query=steps.query * KEY**-0.5, decay=decay), None, 16)[0]
    theirs = naive("retention").naive_retention(*(by_head(part) for part in steps[:3]))
    torch.testing.assert_close(ours, by_head(theirs), rtol=1e-4, atol=1e-4)
    for part in steps[:3]:
        gradients = [torch.autograd.grad(out.square().sum(), part, retain_graph=True)[0] for out in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_gated_linear_attention(steps):
    decay = fading(KEY)
    theirs, _ = naive("gla").naive_recurrent_gla(steps.query * KEY**0.5, steps.key, steps.value, decay)
    same(steps._replace(decay=decay), theirs)


def test_one_decay_a_head_and_its_weights(steps):
    decay = fading(1)
    full = steps._replace(decay=decay)
    theirs, weights = naive("simple_gla").naive_parallel_simple_gla(*steps[:3], decay[..., 0], scale=1.0)
    same(full, theirs)
    torch.testing.assert_close(effective_weights(full), weights, rtol=1e-4, atol=1e-4)


def corrected(steps):
    strength = torch.rand(BATCH, TOKENS, HEADS, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return steps._replace(key=torch.nn.functional.normalize(steps.key, dim=-1), strength=strength)


def test_the_delta_rule(steps):
    full = corrected(steps)
    parts = (by_head(part) for part in (full.query * KEY**0.5, full.key, full.value, full.strength))
    theirs, _ = naive("delta_rule").delta_rule_recurrence(*parts)
    same(full, by_head(theirs))


def test_the_gated_delta_rule(steps):
    decay = fading(1)
    full = corrected(steps)
    theirs, _ = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        full.query, full.key, full.value, full.strength, decay[..., 0], scale=1.0
    )
    same(full._replace(decay=decay), theirs)


def test_kimi_delta_attention(steps):
    decay = fading(KEY)
    full = corrected(steps)
    theirs, _ = naive("kda").naive_recurrent_kda(full.query, full.key, full.value, decay, full.strength, scale=1.0)
    same(full._replace(decay=decay), theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epsilon", [1e-12])
def test_performer_softmax_features_with_the_same_directions(epsilon):
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda, linear_attention, softmax_kernel

    query, key, value = (rows(size, seed).double() for size, seed in ((KEY, 0), (KEY, 1), (VALUE, 2)))
    directions = torch.randn(16, KEY, dtype=torch.float64)
    ones = torch.nn.functional.pad(value, (0, 1), value=1.0)
    parts = (
        favor.query_features(favor.log_features(query, directions), epsilon),
        favor.log_features(key, directions),
        ones,
    )
    theirs = [
        softmax_kernel(by_head(part), projection_matrix=directions, is_query=is_query, eps=epsilon)
        for part, is_query in ((query, True), (key, False))
    ]
    full = favor.quotient(favor.full_sums(*parts, epsilon))
    torch.testing.assert_close(full, by_head(linear_attention(*theirs, by_head(value))), rtol=1e-8, atol=1e-8)
    causal = favor.quotient(favor.causal_sums(*parts, None, chunk=16, epsilon=epsilon)[0])
    expected = by_head(causal_linear_attention_noncuda(*theirs, by_head(value), eps=epsilon))
    torch.testing.assert_close(causal, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_performer_relu_features_with_the_same_directions():
    from performer_pytorch.performer_pytorch import generalized_kernel, linear_attention

    torch.manual_seed(0)
    mechanism = installed().mechanisms.get("performer")
    config = configure(mechanism, {"kernel": "relu", "features": 9}, width=8, heads=2, causal=False)
    layer = mechanism.build(config).double()
    given = torch.randn(2, 7, 8, dtype=torch.float64)
    query, key, value = (
        linear(given).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
    )
    features = [
        generalized_kernel(part, projection_matrix=layer.projection, normalize_data=False) for part in (query, key)
    ]
    expected = layer.output(linear_attention(*features, value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_efficient_attention_but_for_the_scale_that_the_oracle_adds():
    from linear_attention_transformer.linear_attention_transformer import linear_attn

    torch.manual_seed(0)
    mechanism = installed().mechanisms.get("efficient")
    layer = mechanism.build(configure(mechanism, width=8, heads=2, causal=False)).double()
    given = torch.randn(2, 7, 8, dtype=torch.float64)
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    parts = [linear(given).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)]
    expected = linear_attn(*parts, kv_mask=keep).transpose(1, 2).flatten(-2) * 4**0.5
    torch.testing.assert_close(layer(given, keep=keep), layer.output(expected), rtol=1e-12, atol=1e-12)
