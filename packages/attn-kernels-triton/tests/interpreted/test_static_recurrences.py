"""Recorded decode steps over states in slots compute what layers define, in whatever order requests come."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.stores import StoreSize
from attn_kernels_triton.launch import Launch
from attn_testing import DictionaryStore
from bounds import require_close
from static_steps import PADDED, WIDTH, config_of, prepared

CACHES = {
    "linear": "paged",
    "retnet": "shared",
    "lightning": "paged",
    "gla": "shared",
    "deltanet": "paged",
    "kda": "int8",
    "gated_deltanet": "shared",
    "mamba2": "paged",
}
"""Recurrences, each with a store in which its states are kept."""
PROMPTS = (6, 1, 11)
ORDERS = ([2, 0], [1, 2, 0], [0, 1], [2])
"""The requests of each step."""


def rows_of(number: int, count: int) -> torch.Tensor:
    """The rows of a step."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(number))


def step_of(layer, static, at: list[tuple[int, int]], rows: torch.Tensor) -> torch.Tensor:
    """A static step of requests with their positions, padded with rows that mean nothing."""
    positions, names = [position for _, position in at], [request for request, _ in at]
    static.load([0] * len(at), positions, [1] * len(at), names, PADDED)
    padded = torch.cat([rows, torch.full((PADDED - len(at), WIDTH), 9.0, dtype=rows.dtype)])
    with torch.inference_mode():
        return layer.step(padded, static.batch(PADDED, 1), static.view(PADDED, 1)["layer"])[: len(at)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_static_steps_after_prompts_compute_what_the_layer_defines_in_float64(name, programs):
    layer, store = prepared(name, CACHES[name], PROMPTS)
    exact, (_, plain) = copy.deepcopy(layer).double(), prepared(name, CACHES[name], PROMPTS)
    static, computed = store.static_step(PADDED, PADDED, 1024), list(PROMPTS)
    for number, order in enumerate(ORDERS):
        rows, contexts = rows_of(number, len(order)), [computed[request] for request in order]
        batch = RaggedBatch.of((1,) * len(order), contexts, torch.tensor)
        with torch.inference_mode():
            expected = exact.step(rows.double(), batch, plain.view(batch, order)["layer"])
        programs.clear()
        found = step_of(layer, static, list(zip(order, contexts, strict=True)), rows)
        assert "step_heads" in programs
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for request in order:
            computed[request] += 1
    for request in range(len(PROMPTS)):
        found, expected = (kept._slots.export_rows(kept._index(request)) for kept in (store, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_a_request_that_begins_in_the_slot_of_another_begins_anew(name):
    layer, store = prepared(name, CACHES[name], PROMPTS)
    static, row = store.static_step(PADDED, PADDED, 1024), rows_of(0, 1)
    store.release(0)
    assert store.admit(7)
    assert store.reserve(7, 2)
    found = step_of(layer, static, [(7, 0)], row)
    with torch.inference_mode():
        expected = copy.deepcopy(layer).double()(row[None].double())[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_static_steps_start_the_same_programs_over_the_same_memory(name, monkeypatch):
    layer, store = prepared(name, CACHES[name], PROMPTS)
    static, steps, seen = store.static_step(PADDED, PADDED, 1024), [], []
    run = Launch.run

    def recorded(self, device):
        fields = self.call._asdict()
        kept = [fields["memory"].data] if "memory" in fields else []
        addresses = [part.data_ptr() for part in (*kept, fields.get("slots")) if part is not None]
        seen.append((self.program.__name__, self.programs, addresses))
        run(self, device)

    for number in range(3):
        step_of(layer, static, [(1, PROMPTS[1] + number)], rows_of(number, 1))
        steps.append(list(seen))
        seen.clear()
        monkeypatch.setattr(Launch, "run", recorded)  # programs of the first step were tried before
    assert any(program == "step_heads" for program, _, _ in steps[1])
    assert steps[1] == steps[2]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_what_a_layer_asks_is_what_its_mechanism_says(name):
    layer, _ = prepared(name, CACHES[name], PROMPTS)
    config = layer.mechanism_config
    assert layer.step_spec == installed().mechanisms.get(name).recurrent_step(config)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_a_kernel_that_was_asked_for_by_name_is_not_replaced(name, programs):
    layer, store = prepared(name, CACHES[name], PROMPTS)
    if not hasattr(layer, "plan"):
        return
    layer.plan = type(layer.plan)(installed().kernels, "plain_recurrent")
    programs.clear()
    step_of(layer, store.static_step(PADDED, PADDED, 1024), [(1, PROMPTS[1])], rows_of(0, 1))
    assert not {"step_heads", "go_through"} & set(programs)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_with_gradients_layers_compute_steps_themselves(name, programs):
    layer, store = prepared(name, CACHES[name], PROMPTS)
    batch = RaggedBatch.of((1,), (PROMPTS[1],), torch.tensor)
    programs.clear()
    out = layer.step(rows_of(0, 1), batch, store.view(batch, [1])["layer"])
    assert out.requires_grad
    assert "step_heads" not in programs


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_steps_in_bfloat16_are_as_close_to_float64_as_those_that_the_layer_computes_itself(name):
    torch.manual_seed(0)
    mechanism, config = installed().mechanisms.get(name), config_of(name)
    layer, specs = mechanism.build(config).bfloat16(), {"layer": mechanism.state(config)}
    store = installed().caches.get("paged").create(specs, StoreSize(tokens=64, requests=2, dtype="bfloat16"))
    plain, exact = DictionaryStore(specs, "bfloat16"), DictionaryStore(specs, "float64")
    for kept in (store, plain, exact):
        for request in range(2):
            assert kept.admit(request)
            assert kept.reserve(request, 3)
    lanes = ((layer, store), (layer, plain), (copy.deepcopy(layer).double(), exact))
    for number in range(3):
        rows, batch = rows_of(number, 2).bfloat16(), RaggedBatch.of((1, 1), (number, number), torch.tensor)
        with torch.inference_mode():
            outs = [
                one.step(rows.to(one.output.weight.dtype), batch, kept.view(batch, [0, 1])["layer"])
                for one, kept in lanes
            ]
        require_close(*outs, f"{name} {number}")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CACHES)
def test_a_token_beside_a_chunk_of_a_prompt_is_computed_as_in_a_step_of_single_tokens(name, programs):
    """Request 0 computes 3 tokens more and request 2 a single one; then the same of 2 in a step of single tokens."""
    layer, store = prepared(name, CACHES[name], PROMPTS)
    _, other = prepared(name, CACHES[name], PROMPTS)
    rows, contexts = rows_of(3, 4), (PROMPTS[0], PROMPTS[2])
    batch = RaggedBatch.of((3, 1), contexts, torch.tensor)
    single = RaggedBatch.of((1,), contexts[1:], torch.tensor)
    programs.clear()
    with torch.inference_mode():
        mixed = layer.step(rows, batch, store.view(batch, [0, 2])["layer"])
        started = programs.count("step_heads")
        alone = layer.step(rows[3:], single, other.view(single, [2])["layer"])
    assert started == 1
    torch.testing.assert_close(mixed[3:], alone, rtol=1e-6, atol=1e-7)
    found, expected = (kept._slots.export_rows(kept._index(2)) for kept in (store, other))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    exact, plain = copy.deepcopy(layer).double(), prepared(name, CACHES[name], PROMPTS)[1]
    with torch.inference_mode():
        truth = exact.step(rows.double(), batch, plain.view(batch, [0, 2])["layer"])
    torch.testing.assert_close(mixed.double(), truth, rtol=1e-4, atol=1e-5)
    for request in (0, 2):
        found, expected = (kept._slots.export_rows(kept._index(request)) for kept in (store, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
