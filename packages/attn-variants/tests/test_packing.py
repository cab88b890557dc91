from __future__ import annotations

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Heads, configure, installed
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import Varlen
from attn_core.masks import Strided
from attn_core.modifiers import RelativeBias
from attn_variants.attention.kernels import AttentionKernels

LENGTHS = (5, 0, 1, 9)
MECHANISMS = {"gqa": {}, "sliding_window": {"window": 3}, "t5_bias": {}, "alibi": {}, "attention_sinks": {"window": 4}}


def layer_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    return mechanism.build(configure(mechanism, MECHANISMS[name], hidden_size=32, num_heads=4, causal=True))


@pytest.mark.parametrize("name", MECHANISMS)
def test_packed_texts_are_what_each_is_alone_with_gradients(name):
    layer = layer_of(name)
    rows = torch.randn(2, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(1))
    varlen = layer(rows, lengths=LENGTHS)
    alone = torch.cat([layer(part) for part in rows.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(varlen, alone, rtol=1e-5, atol=1e-6)
    weights = list(layer.parameters())
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), weights, allow_unused=True) for out in (varlen, alone)), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "key_padding_mask", "message"),
    [((5, 9), None, "lengths"), ((-1, 16), None, "varlen.queries"), ((15,), torch.ones(1, 15).bool(), "lengths")],
)
def test_lengths_that_are_not_all_rows_are_refused(lengths, key_padding_mask, message):
    with pytest.raises(InvalidValue, match=f"^{message}"):
        layer_of("gqa")(torch.zeros(1, 15, 32), lengths=lengths, key_padding_mask=key_padding_mask)


@pytest.mark.parametrize("kernel", [None, "plain"])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Strided(2)], ids=lambda mask: mask.kind)
def test_texts_that_no_kernel_takes_together_are_computed_one_by_one(kernel, mask):
    heads = Heads(query=2, key_value=1, key_size=8, value_size=8)
    spec = AttentionSpec(heads=heads, mask=mask, modifiers=(RelativeBias(clip=2),))
    plan, varlen = AttentionKernels(spec, kernel), Varlen((3, 0, 2), (4, 2, 2))
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, h, 8, generator=draw) for n, h in ((5, 2), (8, 1), (8, 1)))
    table = {"modifiers.relative_bias.table": torch.randn(5, 2, generator=draw)}
    found = plan.run(AttentionInputs(query=query, key=key, value=value, parameters=table, varlen=varlen))
    for asked, met in varlen.spans():
        alone = AttentionInputs(query=query[:, asked], key=key[:, met], value=value[:, met], parameters=table)
        assert torch.equal(found[:, asked], plan.run(alone))


def test_no_texts_are_no_rows():
    assert layer_of("gqa")(torch.zeros(2, 0, 32), lengths=()).shape == (2, 0, 32)
