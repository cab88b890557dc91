"""Published models have the number of weights that their makers say; counted without memory for them."""

from __future__ import annotations

import pytest
from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.experts import active_parameters
from attn_models.decoder.weightless import weightless
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.families.doors import door_of


def gpt(**fields):
    return door_of("gpt2").configure({"vocab_size": 50257} | fields)


def llama(kind, layers, width, hidden, heads, shared, **fields):
    return door_of(kind).configure(
        {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
            "max_position_embeddings": 4096,
        }
        | fields
    )


COUNTS = {
    "GPT-2 XL": (gpt(n_positions=1024, n_embd=1600, n_layer=48, n_head=25), 1_557_611_200),
    "GPT-3": (gpt(n_positions=2048, n_embd=12288, n_layer=96, n_head=96), 174_604_259_328),
    "Llama 2 7B": (llama("llama", 32, 4096, 11008, 32, 32, vocab_size=32000), 6_738_415_616),
    "Llama 3 8B": (llama("llama", 32, 4096, 14336, 32, 8, vocab_size=128256), 8_030_261_248),
    "Mistral 7B": (llama("mistral", 32, 4096, 14336, 32, 8, vocab_size=32000, sliding_window=4096), 7_241_732_096),
    "Mixtral 8x7B": (
        llama("mixtral", 32, 4096, 14336, 32, 8, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "SmolLM2 135M": (
        llama("llama", 30, 576, 1536, 9, 3, vocab_size=49152, tie_word_embeddings=True),
        134_515_008,
    ),
    "Gemma 3 270M": (llama("gemma3_text", 18, 640, 2048, 4, 1, vocab_size=262144), 268_098_176),
}


@pytest.mark.parametrize("name", COUNTS)
def test_cl_28_a_published_decoder_has_its_published_number_of_weights(name: str) -> None:
    config, expected = COUNTS[name]
    assert isinstance(config, DecoderConfig)
    with weightless():
        model = Decoder(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_a_token_of_mixtral_uses_12_9_billion_of_its_weights() -> None:
    with weightless():
        model = Decoder(COUNTS["Mixtral 8x7B"][0])
    assert active_parameters(model) == 12_879_925_248


def test_bert_base_has_110_million_weights_with_its_pooler() -> None:
    config = EncoderConfig(vocabulary=30522, context=512, width=768, layers=12, heads=12, hidden=3072)
    with weightless():
        count = sum(parameter.numel() for parameter in Encoder(config).parameters())
    assert count + 768 * 768 + 768 == 109_482_240
