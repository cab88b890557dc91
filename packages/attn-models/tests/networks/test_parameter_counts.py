"""Published models have the number of weights that their makers say; counted without memory for them."""

from __future__ import annotations

import pytest
from attn_core import installed
from attn_models.adapters.registry import decoder_adapter
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import active_parameters
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_schema.decoder import DecoderConfig


def gpt(**fields):
    return decoder_adapter("gpt2").from_hf_config({"vocab_size": 50257} | fields)


def llama(kind, layers, width, hidden, heads, shared, **fields):
    return decoder_adapter(kind).from_hf_config(
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


DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}

DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "n_routed_experts": 160,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "q_lora_rank": 1536,
}


def kept_and_used(layout, values):
    """The numbers that a checkpoint keeps, biases of routers among them, and those that one token uses."""
    with init_empty_weights():
        model = Decoder(decoder_adapter(layout).from_hf_config(values))
    kept = sum(tensor.numel() for tensor in model.state_dict().values())
    routed = kept - sum(parameter.numel() for parameter in model.parameters())
    return kept, active_parameters(model) + routed


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
    with init_empty_weights():
        model = Decoder(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_gpt_3_has_as_many_weights_with_its_bands_as_without() -> None:
    family = installed().models.get("gpt3")
    config = family.configure(
        {"vocab_size": 50257, "max_seq_len": 2048, "hidden_size": 12288, "num_layers": 96, "num_heads": 96}
    )
    with init_empty_weights():
        model = family.build(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 174_604_259_328
    assert [config.choice(layer).mechanism for layer in range(4)] == [
        "attn-variants/mha",
        "attn-variants/sliding_window",
    ] * 2


def test_a_block_of_retnet_has_12_times_the_square_of_its_width() -> None:
    family = installed().models.get("retnet_lm")
    sizes = {"vocab_size": 9, "max_seq_len": 16, "hidden_size": 512, "num_heads": 2}
    counts = []
    for layers in (1, 2):
        with init_empty_weights():
            model = family.build(family.configure(sizes | {"num_layers": layers}))
        counts.append(sum(p.numel() for p in model.parameters() if p.dim() > 1))
    assert counts[1] - counts[0] == 12 * 512**2


def test_a_token_of_mixtral_uses_12_9_billion_of_its_weights() -> None:
    with init_empty_weights():
        model = Decoder(COUNTS["Mixtral 8x7B"][0])
    assert active_parameters(model) == 12_879_925_248 == installed().shapes.get("mixtral-8x7b").active_parameters


def test_bert_base_has_110_million_weights_with_its_pooler() -> None:
    config = EncoderConfig(
        vocab_size=30522, max_seq_len=512, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072
    )
    with init_empty_weights():
        count = sum(parameter.numel() for parameter in Encoder(config).parameters())
    assert count + 768 * 768 + 768 == 109_482_240


@pytest.mark.parametrize(
    ("name", "layout", "values", "total", "billions"),
    [
        ("deepseek-v3", "deepseek_v3", DEEPSEEK_V3, 671_026_419_200, 37),
        ("deepseek-v2", "deepseek_v2", DEEPSEEK_V2, 235_741_434_880, 21),
        ("deepseek-v2-lite", "deepseek_v2", DEEPSEEK_V2_LITE, 15_706_484_224, 2.4),
    ],
    ids=["V3", "V2", "V2-Lite"],
)
def test_deepseek_has_its_published_number_of_weights_and_a_token_uses_few(name, layout, values, total, billions):
    # Sparse layers are all alike: two models that differ by one say what one keeps, without the wait for all.
    dense, layers = values["first_k_dense_replace"], values["num_hidden_layers"]
    one, two = (kept_and_used(layout, values | {"num_hidden_layers": dense + n}) for n in (1, 2))
    kept, used = (first + (layers - dense - 1) * (second - first) for first, second in zip(one, two, strict=True))
    assert kept == total
    shape = installed().shapes.get(name)
    assert (shape.parameters, shape.active_parameters) == (kept, used)
    read = used - values["vocab_size"] * values["hidden_size"]  # of the embedding a token uses one row
    assert read / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(
    ("width", "heads", "published", "counted"),
    [(512, 8, 65e6, 63_045_632), (1024, 16, 213e6, 214_171_648)],
    ids=["base", "big"],
)
def test_the_transformer_of_2017_has_the_weights_of_its_table(width, heads, published, counted) -> None:
    family = installed().models.get("transformer")
    sizes = {"hidden_size": width, "num_heads": heads, "intermediate_size": 4 * width, "num_layers": 6}
    config = family.configure({"vocab_size": 37000, "max_seq_len": 512, "max_encoder_len": 512} | sizes)
    with init_empty_weights():
        count = sum(parameter.numel() for parameter in family.build(config).parameters())
    shape = installed().shapes.get("transformer-base" if width == 512 else "transformer-big")
    assert count == counted == shape.parameters
    assert (shape.num_layers, shape.encoder_layers, shape.hidden_size, shape.num_heads) == (6, 6, width, heads)
    assert count == pytest.approx(published, rel=0.04)
