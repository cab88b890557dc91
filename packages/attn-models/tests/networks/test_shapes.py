"""The published sizes give the published numbers."""

from __future__ import annotations

import pytest
from attn_core import configure, installed, state_bytes

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "smollm2-135m": 134_515_008,
}
COUNTED_AS_MODELS = {"deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "transformer-base", "transformer-big"}
"""In test_parameter_counts, as their layers differ."""
ENCODERS = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
}
"""BERT with its pooler, as Hugging Face has it; ViT with a head of 1000 classes, as timm has it."""
GPT_CONTEXT = {"gpt2": 1024, "gpt2-medium": 1024, "gpt2-large": 1024, "gpt2-xl": 1024, "gpt3-175b": 2048}


def cache_bytes(name, tokens, **shared):
    shape = installed().shapes.get(name)
    mechanism = installed().mechanisms.get(shape.mechanism)
    sizes = {"hidden_size": shape.hidden_size, "num_heads": shape.num_heads, "head_dim": shape.head_dim}
    config = configure(mechanism, shape.options, **sizes | {"num_kv_heads": shape.num_kv_heads} | shared)
    return shape.num_layers * state_bytes(mechanism.state(config), tokens=tokens, dtype="bf16")


def test_every_shape_is_tested_here():
    assert {shape.name for shape in installed().shapes} == PARAMETERS.keys() | ENCODERS.keys() | COUNTED_AS_MODELS


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_says_its_published_number_of_parameters(name):
    assert installed().shapes.get(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_sizes_add_up_to_the_published_number_of_parameters(name):
    shape = installed().shapes.get(name)
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    matrices = 2 * shape.hidden_size * heads
    if name in GPT_CONTEXT:
        biases = (
            heads
            + shape.num_kv_heads * shape.head_dim
            + shape.hidden_size
            + shape.intermediate_size
            + shape.hidden_size
        )
        block = matrices + 2 * shape.hidden_size * shape.intermediate_size + biases + 4 * shape.hidden_size
        outside = (shape.vocab_size + GPT_CONTEXT[name] + 2) * shape.hidden_size
    else:
        routers = shape.hidden_size * (shape.num_experts or 0)
        block = (
            matrices
            + (shape.num_experts or 1) * 3 * shape.hidden_size * shape.intermediate_size
            + routers
            + 2 * shape.hidden_size
        )
        tied = name == "smollm2-135m"
        outside = ((1 if tied else 2) * shape.vocab_size + 1) * shape.hidden_size
    assert shape.num_layers * (block) + outside == PARAMETERS[name]


@pytest.mark.parametrize("name", ENCODERS)
def test_the_sizes_of_an_encoder_add_up_to_the_published_number_of_parameters(name):
    shape = installed().shapes.get(name)
    width, wide = shape.hidden_size, shape.intermediate_size
    block = 4 * width**2 + 4 * width + 2 * width * wide + wide + width + 4 * width
    if shape.vocab_size:  # tokens, 512 positions, two kinds of sentences, a norm; the pooler
        outside = (shape.vocab_size + 512 + 2 + 2) * width + width**2 + width
    else:  # patches, the class token, 197 positions, a norm; 1000 classes
        outside = (16 * 16 * 3 + 1) * width + (1 + 197 + 2) * width + 1000 * (width + 1)
    assert shape.num_layers * block + outside == shape.parameters == ENCODERS[name]
    assert not shape.causal


def test_the_cache_of_llama_3_70b_weighs_what_the_courses_say():
    assert 8 * cache_bytes("llama-3-70b", 1000) == 2_621_440_000
    assert 8 * cache_bytes("llama-3-70b", 1000, num_kv_heads=64) == 20_971_520_000


def test_the_cache_of_mistral_stops_growing_at_its_window():
    assert cache_bytes("mistral-7b", 4096) == cache_bytes("mistral-7b", 32768) == 4096 * 32 * 2 * 8 * 128 * 2
    assert cache_bytes("mistral-7b", 2048) == cache_bytes("mistral-7b", 4096) // 2
