"""Layers of one model that share weights: counted once, saved once, and still shared when a folder is read."""

from __future__ import annotations

import torch
from attn_core import installed
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.loading.encoders import save_encoder
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer

OPTIONS = {"rank": 4, "sharing": "layers"}
SIZES = {"vocab_size": 9, "hidden_size": 8, "num_layers": 3, "num_heads": 2, "max_seq_len": 9, "intermediate_size": 9}


def encoder(sharing):
    torch.manual_seed(0)
    return Encoder(EncoderConfig(**SIZES, mechanism="linformer", options=OPTIONS | {"sharing": sharing})).eval()


def parameters(model):
    return sum(weight.numel() for weight in model.parameters())


def test_three_layers_have_one_matrix_between_them():
    assert parameters(encoder("keys_values")) - parameters(encoder("layers")) == 2 * 9 * 4


def test_a_saved_model_is_read_with_its_layers_still_sharing(tmp_path):
    model, tokens = encoder("layers"), torch.tensor([[3, 1, 4, 1, 5]])
    save_encoder(tmp_path / "model", model, character_tokenizer("abcdefgh "))
    read = load_sentence_encoder(tmp_path / "model").model
    torch.testing.assert_close(read(tokens), model(tokens))
    before = read(tokens)
    with torch.no_grad():
        read.blocks[0].attention.inner.key_weight.zero_()
    zeroed = read.blocks[2].attention.inner
    assert not list(zeroed.parameters())
    assert not torch.equal(read(tokens), before)


def test_the_encoder_of_a_transformer_shares_too():
    family = installed().models.get("transformer")
    fields = SIZES | {"max_encoder_len": 9, "encoder": "linformer", "encoder_options": OPTIONS}
    model = family.build(family.configure(fields)).eval()
    assert [sum(1 for _ in block.attention.inner.parameters()) for block in model.encoder] == [1, 0, 0]
    assert model(torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])).isfinite().all()
