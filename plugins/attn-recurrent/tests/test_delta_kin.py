"""The kin of Gated DeltaNet beside the plain torch functions of fla-core, and what only they guarantee."""

import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from attn_core import Shape, configure
from attn_core.errors import InvalidValue
from attn_recurrent.comba import Comba
from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.rule import Rule, one_chunk
from attn_recurrent.gated_deltanet2 import GatedDeltaNet2
from attn_recurrent.gated_deltaproduct import GatedDeltaProduct
from attn_recurrent.mesa_net import MesaNet
from attn_recurrent.momentum_deltanet import MomentumDeltaNet
from attn_recurrent.precond_deltanet import PrecondDeltaNet
from attn_recurrent.precond_kda import PrecondKimiDeltaAttention
from attn_testing import Agreement
from torch.nn.functional import conv1d, logsigmoid, silu, softplus

WIDTH, HEADS, KEY, VALUE, TOKENS = 16, 4, 4, 6, 20
SIZES = {"hidden_size": WIDTH, "num_heads": HEADS}


def naive(operation):
    """The plain torch functions of an operation of fla-core; importing the package itself needs triton."""
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(mechanism, options):
    """A layer with weights far from their initial values."""
    torch.manual_seed(0)
    layer = mechanism.build(configure(mechanism, {"value_size": VALUE} | options, **SIZES))
    for name, weight in layer.named_parameters():
        torch.nn.init.normal_(weight, mean=float(name in {"norm", "feedback"}), std=0.4)
    return layer


def convolved(layer, rows, writes=1):
    """Queries, keys and values [batch, tokens (· writes), heads, size]."""
    joined = torch.cat([layer.query(rows), layer.key(rows), layer.value(rows)], dim=-1)
    taps, channels = layer.filters.shape[1], layer.filters.shape[0]
    mixed = conv1d(joined.transpose(1, 2), layer.filters[:, None], padding=taps - 1, groups=channels)
    return [
        part.unflatten(-1, (count, HEADS, -1)).flatten(1, 2)
        for part, count in zip(
            silu(mixed[..., : rows.shape[1]]).transpose(1, 2).split(
                [HEADS * KEY, writes * HEADS * KEY, writes * HEADS * VALUE], dim=-1
            ),
            (1, writes, writes),
            strict=True,
        )
    ]  # fmt: skip


def projected(layer, rows, writes=1):
    """Queries, keys, values, log decays and sigmoids of strengths [batch, tokens (· writes), heads, ...]."""
    query, key, value = convolved(layer, rows, writes)
    decay = -layer.rate.exp() * softplus(layer.fade(rows) + layer.fade_bias)
    return query, key, value, decay, layer.strength(rows).sigmoid().unflatten(-1, (writes, HEADS)).flatten(1, 2)


def unit(rows):
    """As the library's kernels normalise queries and keys."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def finished(layer, out, gates):
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + layer.eps) * layer.norm
    return layer.output(normed.flatten(-2) * gates)


def agrees(record_property, layer, peer, package, name):
    same = Agreement(record_property, name, package=package)
    learned = [(weight, weight) for weight in layer.parameters()]
    rows = torch.randn(2, TOKENS, WIDTH)
    same.functions(layer, peer, rows, tolerance=2e-4, weights=learned)


@pytest.mark.oracle
def test_several_writes_are_those_of_fla(record_property):
    oracle = naive("gated_delta_product").naive_recurrent_gated_delta_product
    layer = drawn(GatedDeltaProduct(), {"num_householder": 3})

    def peer(rows):
        query, key, value, decay, strength = projected(layer, rows, 3)
        query, key = unit(query), unit(key)
        out, _ = oracle(query, key, value, decay, 2 * strength, KEY**-0.5, num_householder=3)
        return finished(layer, out, silu(layer.gate(rows)))

    agrees(record_property, layer, peer, "fla-core naive_recurrent_gated_delta_product", "gated_deltaproduct")


@pytest.mark.oracle
def test_the_closed_loop_is_that_of_fla(record_property):
    layer = drawn(Comba(), {"correction": 0.7})

    def peer(rows):
        query, key, value, decay, strength = projected(layer, rows)
        part = key * layer.feedback.sigmoid()[:, None]
        query, key, part = (
            unit(one) for one in (query - layer.correction[:, None] * part, key, part)
        )  # fmt: skip
        out, _ = naive("comba").naive_chunk_comba(query, key, value, part, decay, strength, chunk_size=16)
        return finished(layer, out, layer.gate(rows).sigmoid())

    agrees(record_property, layer, peer, "fla-core naive_chunk_comba", "comba")


@pytest.mark.oracle
def test_separate_gates_are_those_of_fla(record_property):
    layer = drawn(GatedDeltaNet2(), {"allow_neg_eigval": True, "rank": 5})

    def peer(rows):
        query, key, value = convolved(layer, rows)
        rates = layer.rate.exp()[:, None]
        decay, erase = (part.unflatten(-1, (HEADS, KEY)) for part in (
            layer.fade(rows) + layer.fade_bias, layer.strength(rows)[..., : HEADS * KEY]))  # fmt: skip
        write = layer.strength(rows)[..., HEADS * KEY :].unflatten(-1, (HEADS, VALUE)).sigmoid()
        out, _ = naive("gdn2").naive_recurrent_gdn2(
            unit(query), unit(key), value, -rates * softplus(decay), 2 * erase.sigmoid(), write
        )
        return finished(layer, out, layer.gate(rows).sigmoid())

    agrees(record_property, layer, peer, "fla-core naive_recurrent_gdn2", "gated_deltanet2")


@pytest.mark.oracle
def test_preconditioned_writes_are_those_of_fla(record_property):
    layer = drawn(PrecondDeltaNet(), {"allow_neg_eigval": True})

    def peer(rows):
        query, key, value = convolved(layer, rows)
        decay = -layer.rate.exp() * softplus(layer.fade(rows) + layer.fade_bias)
        strength = layer.strength(rows).sigmoid()
        out, *_ = naive("precond_gated_delta_rule").naive_recurrent_precond_gated_delta_rule(
            unit(query), unit(key), value, decay[..., HEADS:], decay[..., :HEADS], strength[..., HEADS:],
            2 * strength[..., :HEADS], log_atk_scale=layer.center,
        )  # fmt: skip
        return finished(layer, out, silu(layer.gate(rows)))

    name = "fla-core naive_recurrent_precond_gated_delta_rule"
    agrees(record_property, layer, peer, name, "precond_deltanet")


@pytest.mark.oracle
@pytest.mark.parametrize("bound", [None, -5.0])
def test_preconditioned_writes_of_channels_are_those_of_fla(record_property, bound):
    layer = drawn(PrecondKimiDeltaAttention(), {"allow_neg_eigval": True, "rank": 5, "lower_bound": bound})

    def peer(rows):
        query, key, value = convolved(layer, rows)
        step, rate = (layer.fade(rows) + layer.fade_bias).unflatten(-1, (HEADS, KEY)), layer.rate.exp()[:, None]
        decay = -rate * softplus(step) if bound is None else bound * (rate * step).sigmoid()
        write, gain, fading = layer.strength(rows).split(HEADS, -1)
        out, *_ = naive("precond_kda").naive_recurrent_precond_kda(
            unit(query), unit(key), value, decay, -layer.energy_rate.exp() * softplus(fading + layer.energy_bias),
            gain.sigmoid(), 2 * write.sigmoid(), log_atk_scale=layer.center,
        )  # fmt: skip
        return finished(layer, out, layer.gate(rows).sigmoid())

    agrees(record_property, layer, peer, "fla-core naive_recurrent_precond_kda", "precond_kda")


@pytest.mark.oracle
def test_momentum_is_that_of_fla(record_property, monkeypatch):
    layer = drawn(MomentumDeltaNet(), {})
    # The file takes one name of a package that only its other function uses.
    monkeypatch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=None))
    oracle = naive("momentum_delta_rule").recurrent_momentum_delta_rule_ref

    def peer(rows):
        query, key, value = convolved(layer, rows)
        query, key = unit(query - layer.correction.exp()[:, None] * key), unit(key)
        decay, fading = (-layer.rate.exp() * softplus(layer.fade(rows) + layer.fade_bias)).split(HEADS, -1)
        strength, step = layer.strength(rows).split(HEADS, -1)
        step = (step / WIDTH**0.5).tanh() + 1
        angle = torch.arctan(step * layer.factor.exp())
        decay = (angle.cos() ** 2).log() + decay
        out, _ = oracle(
            query, key, value, decay, fading.clamp(min=-2.0), decay.exp()[..., None] * key,
            angle.sin() ** 2 * strength.sigmoid(), step,
        )  # fmt: skip
        return finished(layer, out, silu(layer.gate(rows)))

    agrees(record_property, layer, peer, "fla-core recurrent_momentum_delta_rule_ref", "momentum_deltanet")


@pytest.mark.oracle
def test_regression_is_that_of_fla(record_property, monkeypatch):
    layer = drawn(MesaNet(), {"value_size": KEY, "lambda_lower_bound": 0.1})
    monkeypatch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=None))
    oracle = naive("mesa_net").naive_mesa_net_exact

    def peer(rows):
        joined = torch.cat([layer.query(rows), layer.key(rows)], dim=-1)
        taps, channels = layer.filters.shape[1], len(layer.filters)
        mixed = conv1d(joined.transpose(1, 2), layer.filters[:, None], padding=taps - 1, groups=channels)
        query, key = silu(mixed[..., : rows.shape[1]]).transpose(1, 2).unflatten(-1, (2, HEADS, KEY)).unbind(2)
        out, *_ = oracle(
            unit(query), unit(key), layer.value(rows).unflatten(-1, (HEADS, KEY)),
            logsigmoid(layer.fade(rows) + layer.fade_bias), (softplus(layer.ridge) + 0.1).view(HEADS, KEY),
            layer.strength(rows).sigmoid(),
        )  # fmt: skip
        return finished(layer, out, 1)

    agrees(record_property, layer, peer, "fla-core naive_mesa_net_exact", "mesa_net")


def test_two_reflections_swap_what_the_memory_holds_for_two_keys():
    """(I - 2uuᵀ) for u = (e₁ - e₂) / √2 exchanges two coordinates, which no positive β below 2 does."""
    swap = torch.tensor([[1.0, -1.0]]) * 0.5**0.5
    memory = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    zeros = torch.zeros(1, 1, 1, 2)
    rule = Rule(zeros, swap[None, None], zeros, torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0))
    torch.testing.assert_close(one_chunk(rule.writes(), memory)[1], memory.flip(2))


def test_fast_decays_give_finite_outputs_and_gradients():
    layer = drawn(Comba(), {})
    torch.nn.init.constant_(layer.rate, 8.0)
    rows = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())


def test_a_write_costs_a_key_a_value_and_a_strength():
    counts = [
        GatedDeltaProduct().cost(configure(GatedDeltaProduct(), {"num_householder": n}, **SIZES), Shape(query=8, key=8))
        for n in (2, 3)
    ]
    one = 2 * WIDTH * WIDTH + WIDTH * HEADS + 4 * 2 * WIDTH
    assert counts[1].parameters - counts[0].parameters == one
    usual = configure(GatedDeltaNet(), {}, **SIZES)
    assert counts[0].parameters - GatedDeltaNet().cost(usual, Shape(query=8, key=8)).parameters == one


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        (GatedDeltaProduct(), {"num_householder": 1}, "num_householder: 1"),
        (Comba(), {"correction": float("nan")}, "correction: nan"),
    ],
)
def test_options_out_of_range_are_refused_by_name(mechanism, options, message):
    with pytest.raises(InvalidValue, match=message):
        configure(mechanism, options, **SIZES)
