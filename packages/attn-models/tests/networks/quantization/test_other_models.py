"""Encoders, models that read a source and recurrent ones say packed what they said before, as far as formats let."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, KernelRefused, WrongState
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading import load_model, save_model
from attn_models.loading.encoders import save_encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.quantization.quantize import quantize_model
from attn_models.recurrent.cells import PrepackedRnn
from attn_models.tokenizers import character_tokenizer

SIZES = {"vocab_size": 23, "max_seq_len": 20, "hidden_size": 32}
SOURCE = SIZES | {"max_encoder_len": 12}
MODELS = {
    "rnnsearch": ("rnnsearch", SOURCE | {"embedding": 32, "maxout": 32}),
    "bottleneck": ("bottleneck", SOURCE | {"embedding": 32, "num_layers": 2}),
    "luong": ("luong", SOURCE | {"embedding": 32}),
    "transformer": ("transformer", SOURCE | {"num_layers": 2, "num_heads": 2, "intermediate_size": 64}),
    "pre-norm": (
        "transformer",
        SOURCE | {"num_layers": 1, "num_heads": 2, "intermediate_size": 64, "norm_place": "pre"},
    ),
    "key_value_lm": ("key_value_lm", SIZES | {"embedding": 32, "options": {"window": 3}}),
    "lstmn_lm": ("lstmn_lm", SIZES | {"num_layers": 1}),
}
ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2, "int8": 8e-2}
"""How far logits may be off in the mean, as a share of their size."""
TOKENIZER = character_tokenizer("abcdefgh ")
TEXTS = ["abc", "hgfedcba abc", "a", "bad cab"]


def built(kind, **changed):
    name, values = MODELS[kind]
    family = installed().models.get(name)
    torch.manual_seed(0)
    model = family.build(family.configure(values | changed)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def logits(model):
    generator = torch.Generator().manual_seed(1)
    tokens, source = (torch.randint(23, (2, length), generator=generator) for length in (9, 7))
    with torch.no_grad():
        return model(tokens, source) if hasattr(model, "max_encoder_len") else model(tokens)


@pytest.fixture
def sentences(tmp_path):
    """A folder with an encoder."""
    torch.manual_seed(0)
    encoder = Encoder(
        EncoderConfig(vocab_size=9, max_seq_len=12, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64)
    ).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(std=0.3)
    return save_encoder(tmp_path / "encoder", encoder, TOKENIZER)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("weights", ROUNDING)
def test_packed_weights_round_and_do_nothing_else(kind, weights):
    plain, packed = built(kind), built(kind)
    quantize_model(packed, weights)
    expected, found = logits(plain), logits(packed)
    assert not torch.equal(found, expected) or weights == "float32"
    assert (found - expected).norm() / expected.norm() < ROUNDING[weights]
    assert packed.quantization == weights


@pytest.mark.parametrize(
    ("kind", "stack", "width", "packs"),
    [
        ("rnnsearch", "encoder", 32, False),
        ("rnnsearch", "encoder", 416, True),
        ("luong", "encoder", 32, False),
        ("luong", "decoder", 32, True),
        ("bottleneck", "decoder", 32, True),
        ("key_value_lm", "lstm", 32, True),
    ],
)
def test_stacks_are_packed_but_for_narrow_ones_that_read_sources(kind, stack, width, packs):
    model = built(kind, hidden_size=width)
    quantize_model(model, "float32")
    assert isinstance(getattr(model, stack), PrepackedRnn) == packs


@pytest.mark.parametrize("kind", MODELS)
def test_a_server_packs_them_without_loss_unasked(kind, tmp_path):
    folder = save_model(tmp_path / "model", built(kind).to(torch.bfloat16))
    loaded, plain = load_model(folder, quantization="auto"), load_model(folder)
    torch.testing.assert_close(logits(loaded.model), logits(plain.model), rtol=1e-4, atol=1e-4)
    assert loaded.parameters == plain.parameters


@pytest.mark.parametrize("weights", ROUNDING)
def test_vectors_of_a_packed_encoder_point_where_they_pointed(sentences, weights):
    plain, packed = load_sentence_encoder(sentences), load_sentence_encoder(sentences, quantization=weights)
    nearness = (plain.embed(TEXTS) * packed.embed(TEXTS)).sum(-1)
    assert nearness.min() > 1 - max(ROUNDING[weights] ** 2, 1e-6)
    assert packed.model.quantization == weights
    assert packed.parameters == plain.parameters


def test_what_is_packed_is_neither_packed_again_nor_saved(sentences, tmp_path):
    encoder, model = load_sentence_encoder(sentences, quantization="int8").model, built("rnnsearch")
    quantize_model(model, "int8")
    with pytest.raises(WrongState, match="packed already, as int8"):
        quantize_model(model, "bfloat16")
    with pytest.raises(WrongState, match="int8"):
        save_model(tmp_path / "model", model)
    with pytest.raises(WrongState, match="int8"):
        save_encoder(tmp_path / "model", encoder)
    assert not (tmp_path / "model").exists()


def test_a_format_that_cannot_be_is_refused_before_anything_is_read(sentences):
    with pytest.raises(InvalidValue, match=r"int3.*auto, none, float32"):
        load_sentence_encoder(sentences, quantization="int3")
    family = installed().models.get("rnnsearch")
    odd = family.build(family.configure(SOURCE | {"embedding": 33, "maxout": 32}))
    with pytest.raises(KernelRefused, match="not a multiple of 32"):
        quantize_model(odd, "int4")
