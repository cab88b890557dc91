"""Modules of torch exchanged for a mechanism's, and weights brought back."""

import copy

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_variants import MultiheadAttention, replace
from attn_variants.replacement import torch_state_dict
from torch import nn


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_attention_computes_the_same(bias):
    model, given, hidden = encoder(bias=bias), torch.randn(2, 9, 32), torch.zeros(2, 9).bool()
    hidden[1, 6:] = True
    expected = model(given, src_key_padding_mask=hidden)[~hidden]
    assert replace(model, "mha") == []
    torch.testing.assert_close(model(given, src_key_padding_mask=hidden)[~hidden], expected, atol=1e-5, rtol=0)


def test_only_what_fits_is_kept_and_the_rest_is_named_and_trained():
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    drawn = replace(model, "gqa", layers=[1], num_kv_heads=2)
    parts = [f"{part}.{kind}" for part in ("key", "value") for kind in ("weight", "bias")]
    assert sorted(drawn) == sorted(f"layers.1.self_attn.attention.{part}" for part in parts)
    kinds = [type(layer.self_attn) for layer in model.layers]
    assert kinds == [nn.MultiheadAttention, MultiheadAttention, nn.MultiheadAttention]
    query = model.layers[1].self_attn.attention.query.weight
    assert torch.equal(query, before["layers.1.self_attn.in_proj_weight"][:32])
    model(torch.randn(2, 9, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.layers[1].self_attn.parameters())


def test_a_whole_transformer_has_its_cross_attention_exchanged_too():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True).eval()
    given, mask = (torch.randn(2, 9, 32), torch.randn(2, 5, 32)), nn.Transformer.generate_square_subsequent_mask(5)
    expected = model(*given, tgt_mask=mask)
    assert replace(model, "mha") == []
    torch.testing.assert_close(model(*given, tgt_mask=mask), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 24, "vdim": 16}, {"add_bias_kv": True}])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_weights_go_back_under_torchs_names(options, kv_heads):
    own = MultiheadAttention(32, 4, mechanism="gqa", num_kv_heads=kv_heads, **options)
    if kv_heads == 2 and "add_bias_kv" in options:
        pytest.skip("torch's learned key has all heads")
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    theirs.load_state_dict(torch_state_dict(own))
    sizes = 32, options.get("kdim", 32), options.get("vdim", 32)
    given = [torch.randn(2, 7, size) for size in sizes]
    torch.testing.assert_close(theirs(*given)[0], own(*given)[0], atol=1e-5, rtol=0)


def test_what_cannot_be_exchanged_is_refused_and_left():
    model = encoder()
    with pytest.raises(InvalidValue, match="layers"):
        replace(model, "mha", layers=[3])
    with pytest.raises(InvalidValue):
        replace(model, "gqa", num_kv_heads=3)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    with pytest.raises(Incompatible, match="Linear"):
        replace(nn.Linear(2, 2), "mha")
    with pytest.raises(Incompatible, match="sparsemax"):
        torch_state_dict(MultiheadAttention(32, 4, mechanism="sparsemax"))
