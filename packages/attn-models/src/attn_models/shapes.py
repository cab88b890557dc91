"""The published sizes of well-known models, for estimating their costs without running them.

Each is from the paper or the config.json that the authors published.
"""

from __future__ import annotations

from typing import Any

from attn_core.models import ModelShape


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
    return _multi_head(name, summary, parameters, num_layers=layers, vocab_size=50257, bias=True, **sizes)


def _encoder(name: str, summary: str, parameters: int, *, layers: int, vocabulary: int = 0, **sizes: int) -> ModelShape:
    """A bidirectional encoder such as BERT or ViT."""
    own = {"num_layers": layers, "vocab_size": vocabulary, "bias": True, "causal": False}
    return _multi_head(name, summary, parameters, **own, **sizes)


def _transformer(name: str, summary: str, parameters: int, **sizes: int) -> ModelShape:
    """The encoder-decoder Transformer of Vaswani et al. 2017: six layers each, and a shared English-German vocabulary
    of 37,000 tokens."""
    return _multi_head(name, summary, parameters, num_layers=6, encoder_layers=6, vocab_size=37000, **sizes)


def _decoder(name: str, summary: str, sizes: tuple[int, ...], parameters: int, **others: Any) -> ModelShape:
    """A decoder with gated feed-forwards; `sizes` are its layers, width, heads, key/value heads, inner width and
    vocabulary."""
    layers, width, heads, kv_heads, inner, vocabulary = sizes
    usual: dict[str, Any] = {
        "mechanism": f"attn-variants/{'mha' if kv_heads == heads else 'gqa'}",
        "head_dim": width // heads,
        "parameters": parameters,
    }
    return ModelShape(
        name=name,
        summary=summary,
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        **usual | others,
    )


def _deepseek(
    name: str,
    summary: str,
    sizes: tuple[int, ...],
    parameters: tuple[int, int],
    experts: tuple[int, int],
    **options: int,
) -> ModelShape:
    """A decoder with latents and experts: all its parameters and experts, and those that a token uses."""
    return _decoder(
        name,
        summary,
        sizes,
        parameters[0],
        active_parameters=parameters[1],
        num_experts=experts[0],
        num_experts_per_tok=experts[1],
        mechanism="attn-variants/mla",
        head_dim=128,
        options={"latent": 512, "rotary_size": 64, **options},
    )


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
        vocabulary=30522,
    ),
    _encoder(
        "bert-large",
        "BERT large, of 512 tokens at most (Devlin et al. 2018)",
        335_141_888,
        layers=24,
        width=1024,
        heads=16,
        vocabulary=30522,
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
    _decoder("llama-2-7b", "Llama 2 7B (Touvron et al. 2023)", (32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    _decoder("llama-2-70b", "Llama 2 70B (Touvron et al. 2023)", (80, 8192, 64, 8, 28672, 32000), 68_976_648_192),
    _decoder("llama-3-8b", "Llama 3 8B (Grattafiori et al. 2024)", (32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    _decoder("llama-3-70b", "Llama 3 70B (Grattafiori et al. 2024)", (80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    _decoder(
        "llama-3.1-405b",
        "Llama 3.1 405B (Grattafiori et al. 2024)",
        (126, 16384, 128, 8, 53248, 128256),
        405_853_388_800,
    ),
    _decoder(
        "mistral-7b",
        "Mistral 7B v0.1, a window of 4096 tokens (Jiang et al. 2023)",
        (32, 4096, 32, 8, 14336, 32000),
        7_241_732_096,
        mechanism="attn-variants/sliding_window",
        options={"window": 4096},
    ),
    _decoder(
        "mixtral-8x7b",
        "Mixtral 8x7B, 46.7 B weights of which a token uses 12.9 B (Jiang et al. 2024)",
        (32, 4096, 32, 8, 14336, 32000),
        46_702_792_704,
        num_experts=8,
        num_experts_per_tok=2,
        active_parameters=12_879_925_248,
    ),
    _decoder("smollm2-135m", "SmolLM2 135M (Ben Allal et al. 2025)", (30, 576, 9, 3, 1536, 49152), 134_515_008),
    _deepseek(
        "deepseek-v3",
        "DeepSeek-V3, latents and 256 experts: 671 B weights of which a token uses 37 B (DeepSeek-AI 2024)",
        (61, 7168, 128, 128, 2048, 129280),
        (671_026_419_200, 37_552_297_472),
        (256, 8),
        query_latent=1536,
    ),
    _deepseek(
        "deepseek-v2",
        "DeepSeek-V2, latents and 160 experts: 236 B weights of which a token uses 21 B (DeepSeek-AI 2024)",
        (60, 5120, 128, 128, 1536, 102400),
        (235_741_434_880, 21_375_800_320),
        (160, 6),
        query_latent=1536,
    ),
    _deepseek(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite, latents and 64 experts: 15.7 B weights, a token uses 2.7 B (DeepSeek-AI 2024)",
        (27, 2048, 16, 16, 1408, 102400),
        (15_706_484_224, 2_661_150_208),
        (64, 6),
    ),
)
