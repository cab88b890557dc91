"""Every mechanism inside PyTorch's own transformers, against its layer called directly."""

import copy
import warnings

import pytest
import torch
from attn_core import Capability, installed
from attn_core.errors import Incompatible
from attn_variants import MultiheadAttention
from cases import kind_of
from torch import nn

WIDTH, HEADS, TOKENS = 16, 4, 7
SIZES = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
PADDED = torch.tensor([[False] * TOKENS, [False] * 5 + [True] * 2])
MECHANISMS = {installed().mechanisms.name_of(mechanism): mechanism for mechanism in installed().mechanisms}


@pytest.fixture(autouse=True)
def quietly():
    """Hides PyTorch's remark that it makes no nested tensors, for each of the ways in which it decides so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        yield


def attention(name, **options):
    options = {"bias": MECHANISMS[name].can(Capability.BIAS), **MECHANISMS[name].sketch, **options}
    return MultiheadAttention(WIDTH, HEADS, mechanism=name, **options)


def directly(module, rows, padded, source=None):
    """The layer of the mechanism, called as this package's layers are: True in a mask is a real key."""
    given = (rows, rows if source is None else source) if module.config.cross or source is not None else (rows,)
    return module.attention(*given, **({} if padded is None else {"key_padding_mask": ~padded}))


def rest(layer, rows, attended):
    """An encoder layer of PyTorch after its attention: two norms and the feed-forward network."""
    rows = layer.norm1(rows + attended)
    return layer.norm2(rows + layer.linear2(torch.relu(layer.linear1(rows))))


def require_same(compute, expect, real=slice(None)):
    """Equal outputs at real positions; both computations start from the same seed."""
    results = []
    for call in (expect, compute):
        torch.manual_seed(5)
        results.append(call()[real])
    assert torch.isfinite(results[0]).all()
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


def masks(mechanism):
    return (None, PADDED) if mechanism.can(Capability.PADDING) else (None,)


def encoder_of(name, built):
    """An encoder that got its attention before it was built, or after."""
    if built == "before":
        layer = nn.TransformerEncoderLayer(**SIZES)
        layer.self_attn = attention(name)
        return nn.TransformerEncoder(layer, 2).double()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2)
    for layer in encoder.layers:
        layer.self_attn = attention(name)
    return encoder.double()


@pytest.mark.sweep(lambda name, built: (kind_of(name), built))
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("built", ["before", "after"])
def test_an_encoder_computes_what_the_layers_of_the_mechanism_do(name, built):
    encoder, rows = encoder_of(name, built), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)

    def expected(padded):
        out = rows
        for layer in copy.deepcopy(encoder).layers:  # as training may move buffers
            out = rest(layer, out, directly(layer.self_attn, out, padded))
        return out

    for padded in masks(MECHANISMS[name]):
        for training in (True, False):
            encoder.train(training)
            real = slice(None) if padded is None else ~padded
            with torch.set_grad_enabled(training):
                require_same(lambda: encoder(rows, src_key_padding_mask=padded), lambda: expected(padded), real)  # noqa: B023


@pytest.mark.sweep(lambda name: kind_of(name))
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_transformer_computes_what_the_layers_of_the_mechanism_do(name):
    mechanism, model = MECHANISMS[name], nn.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1)
    (encoder,), (decoder,) = model.encoder.layers, model.decoder.layers
    encoder.self_attn = attention(name)
    if mechanism.can(Capability.CAUSAL):
        decoder.self_attn = attention(name, causal=True)
    if mechanism.can(Capability.CROSS):
        decoder.multihead_attn = attention(name, cross=True)
    model = model.double().eval()
    source, target = (torch.randn(2, tokens, WIDTH, dtype=torch.float64) for tokens in (TOKENS, 5))
    causal = model.generate_square_subsequent_mask(5, dtype=torch.float64)

    def expected(padded):
        memory = model.encoder.norm(rest(encoder, source, directly(encoder.self_attn, source, padded)))
        if isinstance(decoder.self_attn, MultiheadAttention):
            own = directly(decoder.self_attn, target, None)
        else:
            own, _ = decoder.self_attn(target, target, target, attn_mask=causal)
        rows = decoder.norm1(target + own)
        if isinstance(decoder.multihead_attn, MultiheadAttention):
            seen = directly(decoder.multihead_attn, rows, padded, memory)
        else:
            seen, _ = decoder.multihead_attn(rows, memory, memory, key_padding_mask=padded)
        rows = decoder.norm2(rows + seen)
        return model.decoder.norm(decoder.norm3(rows + decoder.linear2(torch.relu(decoder.linear1(rows)))))

    for padded in masks(mechanism):
        options = {"tgt_mask": causal, "src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        with torch.no_grad():
            require_same(lambda: model(source, target, **options), lambda: expected(padded))  # noqa: B023


def test_padding_that_is_added_to_scores_is_refused_where_there_are_none():
    module, rows = attention("attn-variants/linear"), torch.randn(2, TOKENS, WIDTH)
    for value in (0.5, float("nan")):
        with pytest.raises(Incompatible):
            module(rows, rows, rows, key_padding_mask=torch.full((2, TOKENS), value), need_weights=False)
