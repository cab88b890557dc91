"""Layers reach the rows of every store that shows where they lie, step by step as an engine takes them."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core import MechanismConfig, RaggedBatch, configure, installed
from attn_core.stores import StoreSize
from attn_kernels_triton.backends.paged import TritonPaged

STEPS = [(5, 1, 20), (1, 1, 1), (7, 1, 2), (1, 1, 1)]
"""Tokens that each request computes at each step."""
OPTIONS = {
    "gqa": {},
    "sliding_window": {"window": 9},
    "t5_bias": {"buckets": 8, "max_distance": 20},
    "relative_bias": {"clip": 7},
    "mla": {"latent": 32, "rotary_size": 16, "nope_size": 16, "value_size": 16},
}


@pytest.fixture
def met(monkeypatch):
    """The forms of rows that the kernels met, call by call."""
    seen = []
    run = TritonPaged.run

    def counted(self, spec, operands):
        seen.append((self.name, operands.rows.form))
        return run(self, spec, operands)

    monkeypatch.setattr(TritonPaged, "run", counted)
    return seen


def config_of(name: str) -> MechanismConfig:
    mechanism = installed().mechanisms.get(name)
    options = OPTIONS[name]
    groups = 2 if name == "gqa" else None
    return configure(mechanism, options, hidden_size=64, num_heads=4, num_kv_heads=groups, causal=True, head_dim=32)


def steps(layer: torch.nn.Module, cache: str, config: MechanismConfig, name: str) -> list[torch.Tensor]:
    """What the layer computes at each step of three requests."""
    specs = {"layer": installed().mechanisms.get(name).state(config)}
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=1024, requests=3))
    contexts, outs = [0, 0, 0], []
    for request in range(3):
        assert store.admit(request)
    for number, lengths in enumerate(STEPS):
        for request in range(3):
            assert store.reserve(request, contexts[request] + lengths[request])
        batch = RaggedBatch.of(lengths, contexts, torch.tensor)
        rows = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(number))
        with torch.inference_mode():
            outs.append(layer.step(rows, batch, store.view(batch, [0, 1, 2])["layer"]))
        contexts = [context + length for context, length in zip(contexts, lengths, strict=True)]
    return outs


@pytest.mark.parametrize(
    ("name", "cache", "kernel", "form"),
    [
        ("gqa", "paged", "triton_paged", "plain"),
        ("gqa", "shared", "triton_paged", "plain"),
        ("gqa", "contiguous", "triton_paged", "plain"),
        ("sliding_window", "contiguous", "triton_paged", "plain"),
        ("gqa", "int8", "triton_paged", "int8"),
        ("gqa", "int4", "triton_paged", "int4"),
        ("sliding_window", "paged", "triton_paged", "plain"),
        ("sliding_window", "int4", "triton_paged", "int4"),
        ("t5_bias", "paged", "triton_paged", "plain"),
        ("relative_bias", "int8", "triton_paged", "int8"),
        ("mla", "paged", "triton_latent", "plain"),
    ],
)
def test_a_layer_meets_rows_in_the_store_and_computes_what_the_plain_kernel_does(met, name, cache, kernel, form):
    torch.manual_seed(0)
    config = config_of(name)
    layer = installed().mechanisms.get(name).build(config)
    plain = copy.deepcopy(layer)
    plain.use_kernel("plain")
    found, expected = steps(layer, cache, config, name), steps(plain, cache, config, name)
    # Of the first step one request computes one token, and is met in the store as well.
    assert met == [(kernel, form)] * len(STEPS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "cache"), [("gqa", "kivi"), ("mla", "int8")])
def test_rows_that_no_kernel_reaches_are_gathered(met, name, cache):
    config = config_of(name)
    layer = installed().mechanisms.get(name).build(config)
    assert all(out.isfinite().all() for out in steps(layer, cache, config, name))
    assert met == []


def test_a_layer_that_learns_or_asks_for_a_kernel_by_name_gathers(met):
    config = config_of("gqa")
    layer = installed().mechanisms.get("gqa").build(config)
    layer.use_kernel("triton_attend")
    steps(layer, "paged", config, "gqa")
    assert met == []
