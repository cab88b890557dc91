"""Layers with dropout take the kernel where one can run, and drop the weights that plain torch drops for the seed."""

from __future__ import annotations

import pytest
import torch
from attn_core import AttentionSpec, Causal, Heads, configure, installed
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.dispatch import choose
from attn_core.kernels.product import SMALLEST_PRODUCT
from attn_kernels_cpu.attention import Attention
from attn_variants.compute import whole
from torch.utils.flop_counter import FlopCounterMode

WIDTH, HEADS, TOKENS, SEED = 64, 4, 130, 11
MECHANISMS = {
    "causal": ("mha", {}),
    "shared heads": ("gqa", {"num_kv_heads": 2}),
    "whole texts": ("mha", {"causal": False}),
}


def layer(name, dropout=0.2):
    mechanism = installed().mechanisms.get(MECHANISMS[name][0])
    torch.manual_seed(0)
    fields = {"hidden_size": WIDTH, "num_heads": HEADS, "dropout": dropout} | MECHANISMS[name][1]
    return mechanism.build(configure(mechanism, {}, **fields)).train()


def rows(tokens=TOKENS, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, tokens, WIDTH).to(dtype).requires_grad_()


def outcome(found, given):
    """The output and the gradient of the input."""
    torch.manual_seed(SEED)
    out = found(given)
    (change,) = torch.autograd.grad(out.square().sum(), given)
    return out.detach(), change


@pytest.fixture
def calls(monkeypatch):
    """How often the native kernel was asked."""
    asked = []

    def counted(*given):
        asked.append(given)
        return apply(*given)

    apply = Attention.apply
    monkeypatch.setattr(Attention, "apply", counted)
    return asked


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_layer_with_dropout_computes_what_it_does_in_float64_with_the_same_seed(calls, name):
    found = layer(name)
    got = outcome(found, rows())
    assert len(calls) == 1
    wanted = outcome(found.double(), rows(dtype=torch.float64))
    assert len(calls) == 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_best_kernels")
def test_evaluation_and_dropout_of_0_and_small_calls_do_not_ask_the_kernel(calls):
    torch.manual_seed(2)
    found = layer("causal")
    found.eval()(rows())
    layer("causal", dropout=0.0)(rows())
    few = 8
    assert 2 * few * WIDTH * few < SMALLEST_PRODUCT
    found.train()(rows(few))
    assert calls == []


@pytest.mark.usefixtures("_best_kernels")
def test_who_looks_at_torchs_operations_sees_them(calls):
    found = layer("causal")
    with FlopCounterMode(display=False) as counter:
        found(rows()).sum().backward()
    assert calls == []
    assert counter.get_total_flops() > 2 * 2 * HEADS * TOKENS**2 * WIDTH // HEADS


@pytest.mark.usefixtures("_best_kernels")
def test_torch_func_takes_derivatives_of_a_layer_with_dropout():
    found, given = layer("causal"), rows().detach()

    def loss(values):
        torch.manual_seed(SEED)
        return found(values).square().sum()

    wanted = outcome(found, rows())[1]
    torch.testing.assert_close(torch.func.grad(loss)(given), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_best_kernels")
def test_where_no_kernel_takes_a_call_plain_torch_drops_the_same_weights(calls, monkeypatch):
    wanted = outcome(layer("causal"), rows())
    assert len(calls) == 1
    monkeypatch.setattr(whole, "whole_attention_kernel", lambda *_, **__: None)
    for one, other in zip(outcome(layer("causal"), rows()), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1


@pytest.mark.usefixtures("_best_kernels")
def test_the_kernel_is_offered_for_dropout_alone():
    heads = Heads(query=2, key_value=2, key_size=8, value_size=8)
    asked = {"dtype": "float32", "device": "cpu", "gradients": True, "padded": False}
    for dropout in (True, False):
        problem = attend_problem(AttentionSpec(heads=heads, mask=Causal()), dropout=dropout, **asked)
        taken = choose(installed().kernels, problem)
        assert (taken.name == "whole_dropped") == dropout
