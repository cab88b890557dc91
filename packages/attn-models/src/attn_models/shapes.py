"""The published sizes of well-known models, for prices before anything runs.

Each is from the paper or the config.json that its makers published.
"""

from __future__ import annotations

from attn_core import ModelShape

GPT2_VOCABULARY = 50257
LLAMA2_VOCABULARY = 32000
LLAMA3_VOCABULARY = 128256


def _gpt(name: str, summary: str, *, layers: int, width: int, heads: int) -> ModelShape:
    """A GPT: every head has its own keys and values, the feed-forward is four times as wide as the model."""
    return ModelShape(
        name=name,
        summary=summary,
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=heads,
        head_size=width // heads,
        hidden=4 * width,
        vocabulary=GPT2_VOCABULARY,
        mechanism="mha",
    )


SHAPES = (
    _gpt("gpt2", "GPT-2 124M (Radford et al. 2019)", layers=12, width=768, heads=12),
    _gpt("gpt2-medium", "GPT-2 355M (Radford et al. 2019)", layers=24, width=1024, heads=16),
    _gpt("gpt2-large", "GPT-2 774M (Radford et al. 2019)", layers=36, width=1280, heads=20),
    _gpt("gpt2-xl", "GPT-2 1.5B (Radford et al. 2019)", layers=48, width=1600, heads=25),
    _gpt("gpt3-175b", "GPT-3 175B, priced as dense (Brown et al. 2020)", layers=96, width=12288, heads=96),
    ModelShape(
        name="llama-2-7b",
        summary="Llama 2 7B (Touvron et al. 2023)",
        layers=32,
        width=4096,
        heads=32,
        key_value_heads=32,
        head_size=128,
        hidden=11008,
        vocabulary=LLAMA2_VOCABULARY,
        mechanism="mha",
    ),
    ModelShape(
        name="llama-2-70b",
        summary="Llama 2 70B (Touvron et al. 2023)",
        layers=80,
        width=8192,
        heads=64,
        key_value_heads=8,
        head_size=128,
        hidden=28672,
        vocabulary=LLAMA2_VOCABULARY,
        mechanism="gqa",
    ),
    ModelShape(
        name="llama-3-8b",
        summary="Llama 3 8B (Grattafiori et al. 2024)",
        layers=32,
        width=4096,
        heads=32,
        key_value_heads=8,
        head_size=128,
        hidden=14336,
        vocabulary=LLAMA3_VOCABULARY,
        mechanism="gqa",
    ),
    ModelShape(
        name="llama-3-70b",
        summary="Llama 3 70B (Grattafiori et al. 2024)",
        layers=80,
        width=8192,
        heads=64,
        key_value_heads=8,
        head_size=128,
        hidden=28672,
        vocabulary=LLAMA3_VOCABULARY,
        mechanism="gqa",
    ),
    ModelShape(
        name="llama-3.1-405b",
        summary="Llama 3.1 405B (Grattafiori et al. 2024)",
        layers=126,
        width=16384,
        heads=128,
        key_value_heads=8,
        head_size=128,
        hidden=53248,
        vocabulary=LLAMA3_VOCABULARY,
        mechanism="gqa",
    ),
    ModelShape(
        name="mistral-7b",
        summary="Mistral 7B v0.1, a window of 4096 tokens (Jiang et al. 2023)",
        layers=32,
        width=4096,
        heads=32,
        key_value_heads=8,
        head_size=128,
        hidden=14336,
        vocabulary=LLAMA2_VOCABULARY,
        mechanism="sliding_window",
        options={"window": 4096},
    ),
    ModelShape(
        name="mixtral-8x7b",
        summary="Mixtral 8x7B, 46.7 B weights of which a token uses 12.9 B (Jiang et al. 2024)",
        layers=32,
        width=4096,
        heads=32,
        key_value_heads=8,
        head_size=128,
        hidden=14336,
        vocabulary=LLAMA2_VOCABULARY,
        mechanism="gqa",
        experts=8,
        experts_per_token=2,
    ),
    ModelShape(
        name="smollm2-135m",
        summary="SmolLM2 135M (Ben Allal et al. 2025)",
        layers=30,
        width=576,
        heads=9,
        key_value_heads=3,
        head_size=64,
        hidden=1536,
        vocabulary=49152,
        mechanism="gqa",
    ),
)
