"""Decode steps of one layer over inputs that stay where they are, after prompts of several requests."""

from __future__ import annotations

import torch
from attn_core import MechanismConfig, RaggedBatch, configure, installed
from attn_core.stores import StoreSize

PROMPTS, STEPS, PADDED, WIDTH = (14, 1, 70), 4, 4, 64
OPTIONS = {
    "gqa": {},
    "mha": {},
    "mqa": {},
    "sliding_window": {"window": 9},
    "t5_bias": {"buckets": 8, "max_distance": 20},
    "mla": {"latent": 32, "rotary_size": 16, "nope_size": 16, "value_size": 16},
    "retnet": {},
    "gla": {},
    "deltanet": {},
    "kda": {},
    "linear": {},
    "lightning": {},
    "gated_deltanet": {"key_heads": 2},
    "mamba2": {"state_size": 16, "groups": 2},
}


def config_of(name: str) -> MechanismConfig:
    mechanism = installed().mechanisms.get(name)
    groups = {"gqa": 2, "mqa": 1}.get(name)
    heads = 32 if name == "mqa" else 4
    return configure(
        mechanism, OPTIONS[name], hidden_size=WIDTH, num_heads=heads, num_kv_heads=groups, causal=True, head_dim=32
    )


def prepared(name: str, cache: str, prompts: tuple[int, ...] = PROMPTS):
    """A layer, and a store in which each request's prompt, of so many tokens, has been computed."""
    torch.manual_seed(0)
    mechanism, config = installed().mechanisms.get(name), config_of(name)
    layer = mechanism.build(config)
    specs = {"layer": mechanism.state(config)}
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=1024, requests=PADDED))
    for number, prompt in enumerate(prompts):
        assert store.admit(number)
        assert store.reserve(number, prompt + STEPS)
    rows = torch.randn(sum(prompts), WIDTH, generator=torch.Generator().manual_seed(1))
    batch = RaggedBatch.of(prompts, [0] * len(prompts), torch.tensor)
    with torch.inference_mode():
        layer.step(rows, batch, store.view(batch, [0, 1, 2])["layer"])
    return layer, store


def inputs(step: int) -> torch.Tensor:
    """The rows of three requests at a step."""
    return torch.randn(len(PROMPTS), WIDTH, generator=torch.Generator().manual_seed(100 + step))


def static_step(layer, static, step: int) -> torch.Tensor:
    """What a padded step of inputs in place computes for its real requests."""
    static.load([0, 0, 0], [prompt + step for prompt in PROMPTS], [1, 1, 1], [0, 1, 2], PADDED)
    rows = torch.cat([inputs(step), torch.zeros(PADDED - len(PROMPTS), WIDTH)])
    with torch.inference_mode():
        return layer.step(rows, static.batch(PADDED, 1), static.view(PADDED, 1)["layer"])[: len(PROMPTS)]
