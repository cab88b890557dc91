"""Models whose attention weights are dropped in training."""

from __future__ import annotations

import logging

import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_models.adapters.gpt2 import Gpt2Adapter
from attn_models.adapters.llama import LlamaAdapter
from attn_models.decoder.decoder import Decoder
from attn_models.encoder.config import EncoderConfig, VisionConfig
from attn_models.encoder.encoder import Encoder, VisionTransformer
from torch.utils.checkpoint import checkpoint

BLOCKS = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 12}
READS = {"vocab_size": 23, "max_seq_len": 12, "max_encoder_len": 12}
MODELS = {
    "decoder": lambda p: decoder(attention_dropout=p),
    "pattern": lambda p: decoder(
        attention_dropout=p, pattern=["mha", {"mechanism": "linear", "options": {"dropout": 0}}]
    ),
    "one layer": lambda p: decoder(pattern=["mha", {"mechanism": "mha", "options": {"dropout": p}}]),
    "encoder": lambda p: Encoder(EncoderConfig(vocab_size=23, max_seq_len=12, attention_dropout=p, **BLOCKS)),
    "vision": lambda p: VisionTransformer(VisionConfig(image=8, patch=4, classes=3, attention_dropout=p, **BLOCKS)),
    "transformer": lambda p: family("transformer", attention_dropout=p, **BLOCKS, **READS),
    "recurrent": lambda p: family(
        "key_value_lm",
        vocab_size=23,
        max_seq_len=12,
        hidden_size=8,
        embedding=8,
        mechanism="mha",
        options={"dropout": p},
    ),
}


def decoder(**fields):
    return family(
        "decoder", **{"vocab_size": 23, "max_seq_len": 12, "hidden_size": 8, "num_layers": 2, "num_heads": 2} | fields
    )


def family(name, **values):
    found = installed().models.get(name)
    return found.build(found.configure(values))


def inputs(name):
    torch.manual_seed(1)
    if name == "vision":
        return (torch.randn(2, 3, 8, 8),)
    return (torch.randint(1, 23, (2, 9)),) * (2 if name == "transformer" else 1)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_dropped_in_training_by_torchs_seed_and_never_in_evaluation(name):
    torch.manual_seed(0)
    model, given = MODELS[name](0.5), inputs(name)
    plain = MODELS[name](0.0)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(*given), plain.eval()(*given))
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(model.train()(*given))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(plain.train()(*given), plain.eval()(*given))


def test_blocks_computed_again_for_gradients_drop_the_same_weights():
    torch.manual_seed(0)
    model: Decoder = decoder(attention_dropout=0.5).train()
    hidden = torch.randn(1, 9, 8)
    found = []
    for again in (False, True):
        torch.manual_seed(5)
        block = model.blocks[0]
        out = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        found.append(torch.autograd.grad(out.square().sum(), block.attention.value.weight)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("given", [-0.1, 1.0, float("nan"), "0.1"])
@pytest.mark.parametrize("kind", ["encoder", "vision", "transformer"])
def test_what_is_no_probability_below_one_is_refused(kind, given):
    with pytest.raises(InvalidValue, match="attention_dropout"):
        MODELS[kind](given)


def test_layers_without_weights_and_attention_step_by_step_refuse():
    with pytest.raises(Incompatible, match="mechanism 'linear' computes without attention weights"):
        decoder(attention_dropout=0.1, pattern=["mha", "linear"])
    values = READS | {"hidden_size": 8, "embedding": 6}
    with pytest.raises(Incompatible, match="mechanism 'luong' is computed step by step"):
        family("luong", options={"dropout": 0.1}, **values)


def test_checkpoints_say_what_is_dropped_in_training(caplog):
    sizes = {"vocab_size": 23, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
    adapter = Gpt2Adapter()
    config = adapter.from_hf_config(sizes | {"attn_pdrop": 0.1, "embd_pdrop": 0.2, "resid_pdrop": 0.2})
    for read in (config, adapter.from_hf_config(adapter.to_hf_config(config))):
        assert (read.attention_dropout, read.dropout) == (0.1, 0.2)
    assert adapter.from_hf_config(sizes).attention_dropout == adapter.from_hf_config(sizes).dropout == 0
    with caplog.at_level(logging.WARNING):
        assert adapter.from_hf_config(sizes | {"embd_pdrop": 0.1, "resid_pdrop": 0.0}).dropout == 0
    assert "differ" in caplog.text
    with pytest.raises(InvalidValue, match="attention_dropout"):
        adapter.from_hf_config(sizes | {"attn_pdrop": 2})
    llama = {"vocab_size": 23, "max_position_embeddings": 12, "hidden_size": 8, "intermediate_size": 12}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 2, "attention_dropout": 0.3}
    config = LlamaAdapter().from_hf_config(llama)
    assert config.attention_dropout == 0.3
    assert LlamaAdapter().from_hf_config(LlamaAdapter().to_hf_config(config)).attention_dropout == 0.3
