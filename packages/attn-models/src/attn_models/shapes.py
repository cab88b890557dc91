"""The published sizes of well-known models, for estimating their costs without running them.

Each is from the paper or the config.json that the authors published.
"""

from __future__ import annotations

from typing import Any

from attn_core.models import ModelShape

GPT2_VOCABULARY = 50257
BERT_VOCABULARY = 30522
LLAMA2_VOCABULARY = 32000
LLAMA3_VOCABULARY = 128256


def _multi_head(name: str, summary: str, parameters: int, *, width: int, heads: int, **others: Any) -> ModelShape:
    """A model with multi-head attention, and feed-forwards four times as wide as the model."""
    return ModelShape(
        name=name,
        summary=summary,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        intermediate_size=4 * width,
        mechanism="attn-variants/mha",
        parameters=parameters,
        **others,
    )


def _gpt(name: str, summary: str, parameters: int, *, layers: int, **sizes: int) -> ModelShape:
    """A GPT with GPT-2's vocabulary, and biases."""
    return _multi_head(name, summary, parameters, num_layers=layers, vocab_size=GPT2_VOCABULARY, bias=True, **sizes)


def _encoder(name: str, summary: str, parameters: int, *, layers: int, vocabulary: int = 0, **sizes: int) -> ModelShape:
    """A bidirectional encoder such as BERT or ViT."""
    own = {"num_layers": layers, "vocab_size": vocabulary, "bias": True, "causal": False}
    return _multi_head(name, summary, parameters, **own, **sizes)


def _transformer(name: str, summary: str, parameters: int, **sizes: int) -> ModelShape:
    """The encoder-decoder Transformer of Vaswani et al. 2017: six layers each, and a shared English-German vocabulary
    of 37,000 tokens."""
    return _multi_head(name, summary, parameters, num_layers=6, encoder_layers=6, vocab_size=37000, **sizes)


SHAPES = (
    _transformer("transformer-base", "the Transformer, base (Vaswani et al. 2017)", 63_045_632, width=512, heads=8),
    _transformer("transformer-big", "the Transformer, big (Vaswani et al. 2017)", 214_171_648, width=1024, heads=16),
    _encoder(
        "bert-base",
        "BERT base, of 512 tokens at most (Devlin et al. 2018)",
        109_482_240,
        layers=12,
        width=768,
        heads=12,
        vocabulary=BERT_VOCABULARY,
    ),
    _encoder(
        "bert-large",
        "BERT large, of 512 tokens at most (Devlin et al. 2018)",
        335_141_888,
        layers=24,
        width=1024,
        heads=16,
        vocabulary=BERT_VOCABULARY,
    ),
    _encoder(
        "vit-b-16",
        "ViT-B/16, 197 tokens of an image of 224 pixels, 1000 classes (Dosovitskiy et al. 2020)",
        86_567_656,
        layers=12,
        width=768,
        heads=12,
    ),
    _encoder(
        "vit-l-16",
        "ViT-L/16, 197 tokens of an image of 224 pixels, 1000 classes (Dosovitskiy et al. 2020)",
        304_326_632,
        layers=24,
        width=1024,
        heads=16,
    ),
    _gpt("gpt2", "GPT-2 124M (Radford et al. 2019)", 124_439_808, layers=12, width=768, heads=12),
    _gpt("gpt2-medium", "GPT-2 355M (Radford et al. 2019)", 354_823_168, layers=24, width=1024, heads=16),
    _gpt("gpt2-large", "GPT-2 774M (Radford et al. 2019)", 774_030_080, layers=36, width=1280, heads=20),
    _gpt("gpt2-xl", "GPT-2 1.5B (Radford et al. 2019)", 1_557_611_200, layers=48, width=1600, heads=25),
    _gpt(
        "gpt3-175b",
        "GPT-3 175B, priced as dense (Brown et al. 2020)",
        174_604_259_328,
        layers=96,
        width=12288,
        heads=96,
    ),
    ModelShape(
        name="llama-2-7b",
        summary="Llama 2 7B (Touvron et al. 2023)",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=LLAMA2_VOCABULARY,
        mechanism="attn-variants/mha",
        parameters=6_738_415_616,
    ),
    ModelShape(
        name="llama-2-70b",
        summary="Llama 2 70B (Touvron et al. 2023)",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=LLAMA2_VOCABULARY,
        mechanism="attn-variants/gqa",
        parameters=68_976_648_192,
    ),
    ModelShape(
        name="llama-3-8b",
        summary="Llama 3 8B (Grattafiori et al. 2024)",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=LLAMA3_VOCABULARY,
        mechanism="attn-variants/gqa",
        parameters=8_030_261_248,
    ),
    ModelShape(
        name="llama-3-70b",
        summary="Llama 3 70B (Grattafiori et al. 2024)",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=LLAMA3_VOCABULARY,
        mechanism="attn-variants/gqa",
        parameters=70_553_706_496,
    ),
    ModelShape(
        name="llama-3.1-405b",
        summary="Llama 3.1 405B (Grattafiori et al. 2024)",
        num_layers=126,
        hidden_size=16384,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=53248,
        vocab_size=LLAMA3_VOCABULARY,
        mechanism="attn-variants/gqa",
        parameters=405_853_388_800,
    ),
    ModelShape(
        name="mistral-7b",
        summary="Mistral 7B v0.1, a window of 4096 tokens (Jiang et al. 2023)",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=LLAMA2_VOCABULARY,
        mechanism="attn-variants/sliding_window",
        options={"window": 4096},
        parameters=7_241_732_096,
    ),
    ModelShape(
        name="mixtral-8x7b",
        summary="Mixtral 8x7B, 46.7 B weights of which a token uses 12.9 B (Jiang et al. 2024)",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=LLAMA2_VOCABULARY,
        mechanism="attn-variants/gqa",
        num_experts=8,
        num_experts_per_tok=2,
        parameters=46_702_792_704,
        active_parameters=12_879_925_248,
    ),
    ModelShape(
        name="smollm2-135m",
        summary="SmolLM2 135M (Ben Allal et al. 2025)",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        mechanism="attn-variants/gqa",
        parameters=134_515_008,
    ),
    ModelShape(
        name="deepseek-v3",
        summary="DeepSeek-V3, latents and 256 experts: 671 B weights of which a token uses 37 B (DeepSeek-AI 2024)",
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=128,
        intermediate_size=2048,
        vocab_size=129280,
        mechanism="attn-variants/mla",
        options={"latent": 512, "rotary_size": 64, "query_latent": 1536},
        num_experts=256,
        num_experts_per_tok=8,
        parameters=671_026_419_200,
        active_parameters=37_552_297_472,
    ),
    ModelShape(
        name="deepseek-v2",
        summary="DeepSeek-V2, latents and 160 experts: 236 B weights of which a token uses 21 B (DeepSeek-AI 2024)",
        num_layers=60,
        hidden_size=5120,
        num_heads=128,
        num_kv_heads=128,
        head_dim=128,
        intermediate_size=1536,
        vocab_size=102400,
        mechanism="attn-variants/mla",
        options={"latent": 512, "rotary_size": 64, "query_latent": 1536},
        num_experts=160,
        num_experts_per_tok=6,
        parameters=235_741_434_880,
        active_parameters=21_375_800_320,
    ),
    ModelShape(
        name="deepseek-v2-lite",
        summary="DeepSeek-V2-Lite, latents and 64 experts: 15.7 B weights, a token uses 2.7 B (DeepSeek-AI 2024)",
        num_layers=27,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=1408,
        vocab_size=102400,
        mechanism="attn-variants/mla",
        options={"latent": 512, "rotary_size": 64},
        num_experts=64,
        num_experts_per_tok=6,
        parameters=15_706_484_224,
        active_parameters=2_661_150_208,
    ),
)
