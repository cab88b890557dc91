from __future__ import annotations

import pytest
import torch
from attn_core import Causal, Full, Window, configure, installed
from attn_core.distributions import SoftmaxWithSink
from attn_core.dropout import Dropout
from attn_core.kernels.attend import Varlen, texts
from attn_core.masks import Prefix
from attn_core.modifiers import RelativeBias
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.backends.attend import TritonAttend
from attn_variants.compute.plain import attend as plain_attend
from bounds import require_close, roundings_of
from calls import Call, results, wide

BRAIN = torch.bfloat16
HALF_DROPPED = Dropout(probability=0.5, seed=0xFEDCBA9876543210, offset=0xFFFFFFFF)
CALLS = {
    "causal": Call(Causal()),
    "causal, bfloat16": Call(Causal(), 70, 70, dtype=BRAIN),
    "one query": Call(Causal(), 1, 70),
    "batches of groups": Call(Full(), 40, 33, heads=(4, 2), batch=2),
    "window with sinks": Call(Window(left=9), 70, 70, distribution=SoftmaxWithSink()),
    "blocks of a list": Call(Causal() | Prefix(40), 70, 100),
    "relative biases": Call(Causal(), 40, 71, modifiers=(RelativeBias(clip=5),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_weights_that_are_dropped_are_those_that_the_mask_names(name):
    call = CALLS[name]
    operands = call.operands(dropout=HALF_DROPPED)
    exact, plain = results(plain_attend, call.spec, wide(operands)), results(plain_attend, call.spec, operands)
    for what, found in results(attend, call.spec, operands).items():
        require_close(found, plain[what], exact[what], f"{name}: {what}", roundings_of(what))


def test_packed_texts_drop_weights_each_by_its_own_number():
    varlen = Varlen((5, 0, 33, 1, 20), (40, 9, 33, 60, 7))
    call = Call(Causal(), sum(varlen.queries), sum(varlen.keys), batch=2)
    operands = call.operands(varlen=varlen, dropout=HALF_DROPPED)

    def text_by_text(spec, given):
        return torch.cat([plain_attend(spec, text) for text in texts(given)], 1)

    exact, plain = results(text_by_text, call.spec, wide(operands)), results(text_by_text, call.spec, operands)
    for what, found in results(attend, call.spec, operands).items():
        require_close(found, plain[what], exact[what], what, roundings_of(what))


def test_tiles_of_any_size_drop_the_same(monkeypatch):
    call = Call(Causal(), 70, 70)
    operands = call.operands(dropout=HALF_DROPPED)
    expected = results(attend, call.spec, operands)
    for name in tiles.CHOICES:
        monkeypatch.setitem(tiles.CHOICES, name, tiles.Choice(16, 64, 4, 1))
    for what, found in results(attend, call.spec, operands).items():
        torch.testing.assert_close(found, expected[what], rtol=1e-4, atol=1e-5)


def test_dropping_nothing_changes_nothing_and_seeds_differ():
    call = Call(Causal(), 40, 40)
    without = attend(call.spec, call.operands())
    assert torch.equal(attend(call.spec, call.operands(dropout=Dropout(probability=0.0, seed=1))), without)
    one, other = (attend(call.spec, call.operands(dropout=Dropout(probability=0.5, seed=seed))) for seed in (1, 2))
    assert not torch.allclose(one, other)


def test_outputs_are_right_on_average():
    call = Call(Full(), 4, 32)
    drawn = [attend(call.spec, call.operands(dropout=Dropout(probability=0.2, seed=seed))) for seed in range(64)]
    mean, deviation = torch.stack(drawn).mean(0), torch.stack(drawn).std(0) / 8
    without = attend(call.spec, call.operands())
    assert float(((mean - without) / deviation).abs().max()) < 5


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_a_layer_in_training_takes_this_kernel_and_drops_what_the_plain_one_does(monkeypatch, name):
    mechanism, seen, run = installed().mechanisms.get(name), [], TritonAttend.run

    def counted(self, spec, operands):
        seen.append(operands.dropout)
        return run(self, spec, operands)

    monkeypatch.setattr(TritonAttend, "run", counted)
    options = {"latent": 16, "rotary_size": 8} if name == "mla" else {}
    layer = mechanism.build(configure(mechanism, options, hidden_size=32, num_heads=2, dropout=0.3))
    rows, found = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(1)), []
    for kernel in (None, "plain"):
        layer.use_kernel(kernel)
        torch.manual_seed(7)
        out = layer(rows)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    assert [dropout.probability for dropout in seen] == [0.3]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
