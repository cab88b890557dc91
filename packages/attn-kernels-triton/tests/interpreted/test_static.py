"""Decode steps whose inputs stay where they are compute what steps planned on the host do, and ask for the same each
time."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, configure, installed
from attn_core.errors import NotGraphSafe
from attn_core.stores import StoreSize
from attn_kernels_triton.launch import Launch
from static_steps import PADDED, PROMPTS, STEPS, WIDTH, inputs, prepared, static_step


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """An interpreter's time goes by programs, and there are as many as processors are to be kept busy."""
    monkeypatch.setattr("attn_kernels_triton.paged.step.processors", lambda _: 6)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gqa", "paged"),
        ("gqa", "shared"),
        ("gqa", "int8"),
        ("gqa", "int4"),
        ("mqa", "shared"),
        ("sliding_window", "paged"),
        ("t5_bias", "paged"),
        ("mla", "paged"),
    ],
)
def test_a_static_step_computes_what_a_planned_one_does(name, cache):
    layer, planned = prepared(name, cache)
    _, store = prepared(name, cache)
    static = store.static_step(PADDED, PADDED, 1024)
    for step in range(STEPS):
        batch = RaggedBatch.of((1, 1, 1), [prompt + step for prompt in PROMPTS], torch.tensor)
        with torch.inference_mode():
            expected = layer.step(inputs(step), batch, planned.view(batch, [0, 1, 2])["layer"])
        torch.testing.assert_close(static_step(layer, static, step), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "cache"), [("gqa", "shared"), ("sliding_window", "paged"), ("mla", "paged")])
def test_two_static_steps_start_the_same_programs_over_the_same_memory(name, cache, monkeypatch):
    layer, store = prepared(name, cache)
    static = store.static_step(PADDED, PADDED, 1024)
    seen: list[tuple] = []
    run = Launch.run

    def recorded(self, device):
        tables = {"numbers", "positions", "contexts", "starts"}
        fields = self.call._asdict() if hasattr(self.call, "_asdict") else {}
        addresses = tuple(fields[name].data_ptr() for name in sorted(tables & fields.keys()))
        seen.append((self.program.__name__, self.programs, addresses))
        run(self, device)

    monkeypatch.setattr(Launch, "run", recorded)
    steps = []
    for step in range(3):
        seen.clear()
        static_step(layer, static, step)
        steps.append(list(seen))
    assert any(name == "schedule_step" for name, _, _ in steps[0])
    assert steps[0] == steps[1] == steps[2]


def test_who_asks_the_host_for_lengths_is_refused():
    _, store = prepared("gqa", "paged")
    static = store.static_step(PADDED, PADDED, 1024)
    static.load([0], [5], [1], [0], PADDED)
    with pytest.raises(NotGraphSafe, match="number of cached tokens"):
        _ = static.batch(PADDED, 1).contexts
    with pytest.raises(NotGraphSafe, match="gathered"):
        static.view(PADDED, 1)["layer"]["kv"].rows(range(PADDED))


@pytest.mark.parametrize(("name", "cache"), [("linear", "contiguous"), ("gqa", "contiguous"), ("gqa", "kivi")])
def test_states_and_caches_without_blocks_say_why_not(name, cache):
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, {}, hidden_size=WIDTH, num_heads=4, causal=True)
    specs = {"layer": mechanism.state(config)}
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=1024, requests=2))
    with pytest.raises(NotGraphSafe):
        store.static_step(2, 2, 1024)
