"""The recurrences against independent implementations."""

import importlib.metadata
import importlib.util

import pytest
import torch
from attn_core import configure, installed
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_variants.mechanisms import linear_layers as favor
from attn_variants.mechanisms.recurrence_scan import chunked, effective_weights

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


def same(oracle, steps, expected):
    """Outputs and all gradients, in float32: the oracles know no other type."""
    ours = chunked(steps, None, 16)[0]
    given = [part for part in steps if part is not None]
    oracle.outputs(ours, expected, 1e-4)
    probe = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    oracle.gradients(*(torch.autograd.grad((out * probe).sum(), given) for out in (ours, expected)), 1e-3)


def test_linear_attention_without_its_features(agrees, steps):
    oracle = agrees("linear", package="fla-core naive_chunk_linear_attn")
    same(oracle, steps, naive("linear_attn").naive_chunk_linear_attn(*steps[:3], scale=1.0))


def test_retention(agrees, steps):
    from attn_variants.mechanisms.decay_layers import log_retention

    decay = log_retention(HEADS, steps.key)[None, None].expand(1, TOKENS, -1, 1)
    ours = chunked(steps._replace(query=steps.query * KEY**-0.5, decay=decay), None, 16)[0]
    theirs = naive("retention").naive_retention(*(by_head(part) for part in steps[:3]))
    oracle = agrees("retnet", package="fla-core naive_retention")
    oracle.outputs(ours, by_head(theirs), 1e-4)
    oracle.gradients(*(torch.autograd.grad(out.square().sum(), steps[:3]) for out in (ours, theirs)), 1e-3)


def test_gated_linear_attention(agrees, steps):
    decay = fading(KEY)
    theirs, _ = naive("gla").naive_recurrent_gla(steps.query * KEY**0.5, steps.key, steps.value, decay)
    same(agrees("gla", package="fla-core naive_recurrent_gla"), steps._replace(decay=decay), theirs)


def test_one_decay_a_head_and_its_weights(agrees, steps):
    decay = fading(1)
    full = steps._replace(decay=decay)
    theirs, weights = naive("simple_gla").naive_parallel_simple_gla(*steps[:3], decay[..., 0], scale=1.0)
    oracle = agrees("lightning", package="fla-core naive_parallel_simple_gla")
    same(oracle, full, theirs)
    oracle.outputs(effective_weights(full), weights, 1e-4)


def corrected(steps):
    strength = torch.rand(BATCH, TOKENS, HEADS, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return steps._replace(key=torch.nn.functional.normalize(steps.key, dim=-1), strength=strength)


def test_the_delta_rule(agrees, steps):
    full = corrected(steps)
    parts = (by_head(part) for part in (full.query * KEY**0.5, full.key, full.value, full.strength))
    theirs, _ = naive("delta_rule").delta_rule_recurrence(*parts)
    same(agrees("deltanet", package="fla-core delta_rule_recurrence"), full, by_head(theirs))


def test_the_gated_delta_rule(agrees, steps):
    decay = fading(1)
    full = corrected(steps)
    theirs, _ = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        full.query, full.key, full.value, full.strength, decay[..., 0], scale=1.0
    )
    same(agrees("kda", package="fla-core naive_recurrent_gated_delta_rule"), full._replace(decay=decay), theirs)


def test_kimi_delta_attention(agrees, steps):
    decay = fading(KEY)
    full = corrected(steps)
    theirs, _ = naive("kda").naive_recurrent_kda(full.query, full.key, full.value, decay, full.strength, scale=1.0)
    same(agrees("kda", package="fla-core naive_recurrent_kda"), full._replace(decay=decay), theirs)


@pytest.mark.parametrize(("shared", "bound"), [(2, None), (1, -5.0)])
def test_kimi_delta_attention_whose_heads_share_keys(agrees, shared, bound):
    torch.manual_seed(0)
    mechanism, heads, size = installed().mechanisms.get("kda"), 4, 4
    options = {"key_heads": shared, "value_size": 6, "chunk": 16, "lower_bound": bound, "gate_bias": True}
    layer = mechanism.build(configure(mechanism, options, hidden_size=16, num_heads=heads))
    for name, weight in layer.named_parameters():
        torch.nn.init.normal_(weight, mean=float(name == "norm"), std=0.4)

    def theirs(given):
        joined = torch.cat([layer.query(given), layer.key(given), layer.value(given)], dim=-1).transpose(1, 2)
        mixed = torch.nn.functional.conv1d(
            joined, layer.convolution.weight[:, None], padding=3, groups=joined.shape[1]
        )[..., : given.shape[1]]  # fmt: skip
        query, key, value = torch.nn.functional.silu(mixed).transpose(1, 2).split([shared * size] * 2 + [24], dim=-1)
        query, key = (part.unflatten(-1, (shared, size)) for part in (query, key))
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        step, rate = layer.fade(given).unflatten(-1, (heads, size)) + layer.step_bias, layer.rate.exp()[:, None]
        decay = -rate * torch.nn.functional.softplus(step) if bound is None else bound * (rate * step).sigmoid()
        strength = layer.strength(given).sigmoid()
        out, _ = naive("kda").naive_recurrent_kda(query, key, value.unflatten(-1, (heads, 6)), decay, strength)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + layer.eps) * layer.norm
        return layer.output(normed.flatten(-2) * layer.gate(given).sigmoid())

    oracle = agrees("kda", package="fla-core naive_recurrent_kda")
    learned = [(weight, weight) for weight in layer.parameters()]
    oracle.functions(layer, theirs, torch.randn(2, 37, 16), tolerance=2e-4, weights=learned)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("epsilon", [1e-12])
def test_performer_softmax_features_with_the_same_directions(agrees, epsilon):
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
    oracle = agrees("performer", package="performer-pytorch softmax_kernel and linear_attention")
    expected = by_head(linear_attention(*theirs, by_head(value)))
    oracle.outputs(full, expected, 1e-8)
    leaves = (query, key, value)
    oracle.gradients(
        *(torch.autograd.grad(out.square().sum(), leaves, retain_graph=True) for out in (full, expected)), 1e-6
    )
    causal = favor.quotient(
        favor.causal_sums(parts, None, plan=RecurrenceDispatcher(installed().kernels), chunk=16, epsilon=epsilon)[0]
    )
    expected = by_head(causal_linear_attention_noncuda(*theirs, by_head(value), eps=epsilon))
    oracle.outputs(causal, expected, 1e-6)


@pytest.mark.filterwarnings("ignore")
def test_performer_relu_features_with_the_same_directions(agrees):
    from performer_pytorch.performer_pytorch import generalized_kernel, linear_attention

    torch.manual_seed(0)
    mechanism = installed().mechanisms.get("performer")
    config = configure(mechanism, {"kernel": "relu", "features": 9}, hidden_size=8, num_heads=2, causal=False)
    layer = mechanism.build(config).double()
    given = torch.randn(2, 7, 8, dtype=torch.float64)

    def theirs(rows):
        query, key, value = (
            linear(rows).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)
        )
        features = [
            generalized_kernel(part, projection_matrix=layer.projection, normalize_data=False) for part in (query, key)
        ]
        return layer.output(linear_attention(*features, value).transpose(1, 2).flatten(-2))

    oracle = agrees("performer", package="performer-pytorch generalized_kernel and linear_attention")
    oracle.functions(layer, theirs, given, tolerance=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_efficient_attention_but_for_the_scale_that_the_oracle_adds(agrees):
    from linear_attention_transformer.linear_attention_transformer import linear_attn

    torch.manual_seed(0)
    mechanism = installed().mechanisms.get("efficient")
    layer = mechanism.build(configure(mechanism, hidden_size=8, num_heads=2, causal=False)).double()
    given = torch.randn(2, 7, 8, dtype=torch.float64)
    key_padding_mask = torch.arange(7) < torch.tensor([[7], [4]])

    def theirs(rows):
        parts = [linear(rows).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (layer.query, layer.key, layer.value)]
        return layer.output(linear_attn(*parts, kv_mask=key_padding_mask).transpose(1, 2).flatten(-2) * 4**0.5)

    oracle = agrees("efficient", package="linear-attention-transformer linear_attn")
    oracle.functions(lambda rows: layer(rows, key_padding_mask=key_padding_mask), theirs, given, tolerance=1e-12)
