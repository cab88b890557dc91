"""What a step with prompts asks of a GPU, counted on one that is pretended: waits of the host, copies, kernels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from attn_engine import EngineConfig, Request, SamplingParams
from attn_engine.build import build_engine
from attn_engine.graphs import PROMPTS, Rerun, StepGraphs, StepLimits
from attn_models.quantization.quantize import join_projections, quantize_model
from pretend_cuda import PretendCuda
from pretended import gpu
from test_step_costs import CHARACTERS, GREEDY, SAMPLED, model_of

__all__ = ["gpu"]

SEQUENCES, TOKENS = 4, 64
LENGTHS = ([20, 9], [3, 28, 1])
"""Lengths of prompts that two steps of one size compute."""
MECHANISMS = {
    "mha": {},
    "gqa": {},
    "mqa": {},
    "sliding_window": {"options": {"window": 6}},
    "sink": {},
    "soft_cap": {},
    "qk_norm": {},
    "alibi": {"positions": "none"},
    "t5_bias": {"positions": "none"},
}


def engine_of(model, cache: str = "paged"):
    """An engine whose steps are repeated, and what they are repeated by."""
    config = EngineConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=TOKENS, enforce_eager=True, kv_cache=cache)
    engine = build_engine(model, CHARACTERS, config, kv_cache_tokens=2048)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(TOKENS, SEQUENCES))
    engine.warm_up()
    next(model.parameters()).cpu()  # waits for the recordings, which use the buffers of the first steps
    return engine, graphs


def submit(engine, name: str, length: int, params: SamplingParams) -> None:
    engine.submit(Request(id=name, token_ids=tuple(3 + place % 100 for place in range(length)), params=params))


def stepped(engine, gpu: PretendCuda, replayed: int = 1) -> None:
    """One step, counted alone, that repeats one with prompts."""
    gpu.reset()
    before = engine._runner.graphs.replayed[PROMPTS]
    assert all(output.error is None for output in engine.step())
    assert engine._runner.graphs.replayed[PROMPTS] - before == replayed


def grids(gpu: PretendCuda) -> list[tuple[str, int]]:
    return [(name, grid) for name, grid, _ in gpu.grids]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_host_waits_once_for_a_step_with_prompts(gpu, params):
    engine, graphs = engine_of(model_of(2))
    for number, lengths in enumerate(LENGTHS):
        for place, length in enumerate(lengths):
            submit(engine, f"{number}.{place}", length, params.replace(max_new_tokens=2))
        stepped(engine, gpu)
        assert gpu.syncs == Counter(tolist=1)
        # The inputs, which rows give logits, and what sampling needs, or once more which rows are greedy.
        assert gpu.copies == 3
        while not engine.idle:
            engine.step()
    assert not graphs.reasons


@pytest.mark.parametrize("name", MECHANISMS)
def test_two_steps_of_one_size_start_the_same_programs_over_the_same_inputs(gpu, name):
    engine, graphs = engine_of(model_of(2, name, **MECHANISMS[name]))
    there = graphs.inputs._buffer._device_buffer
    inputs = range(there.data_ptr(), there.data_ptr() + there.nbytes)
    kept = engine._store._kv_cache.memory.values()
    memory = {rows.data_ptr() for fields in kept for rows in fields.values()}
    seen = []
    for number, lengths in enumerate(LENGTHS):
        for place, length in enumerate(lengths):
            submit(engine, f"{number}.{place}", length, GREEDY.replace(max_new_tokens=2))
        stepped(engine, gpu)
        pointers = [[one for one in given if one in inputs or one in memory] for _, _, given in gpu.grids]
        assert gpu.programs["schedule_step"] == 1
        assert gpu.programs["attend_paged"] == 2
        seen.append((grids(gpu), pointers))
        while not engine.idle:
            engine.step()
    assert seen[0] == seen[1]
    assert not graphs.reasons
    assert any(seen[0][1])


def test_steps_with_prompts_over_codes_are_repeated_too(gpu):
    engine, graphs = engine_of(model_of(2), "int8")
    submit(engine, "one", 20, GREEDY)
    stepped(engine, gpu)
    assert (graphs.reasons, gpu.syncs.total()) == ({}, 1)


def test_chunks_beside_single_tokens_take_the_programs_of_prompts_alone(gpu):
    engine, _ = engine_of(model_of(2))
    submit(engine, "first", 30, GREEDY)
    stepped(engine, gpu)
    alone = grids(gpu)
    submit(engine, "second", 25, GREEDY)
    stepped(engine, gpu)
    assert grids(gpu) == alone


def test_a_long_prompt_is_computed_in_chunks_by_the_same_programs(gpu):
    engine, _ = engine_of(model_of(2))
    submit(engine, "long", 3 * TOKENS, GREEDY)
    seen = []
    for _ in range(3):
        stepped(engine, gpu)
        seen.append(grids(gpu))
    assert seen[0] == seen[1] == seen[2]


def test_steps_of_single_tokens_stay_those_of_requests(gpu):
    engine, _ = engine_of(model_of(2))
    submit(engine, "one", 20, GREEDY)
    stepped(engine, gpu)
    stepped(engine, gpu, replayed=0)
    assert gpu.programs["schedule_step"] == 1


def test_a_layer_of_a_step_with_prompts_takes_ten_kernels(gpu):
    counts = []
    for layers in (1, 3):
        model = model_of(layers)
        join_projections(model)
        engine, _ = engine_of(model)
        submit(engine, "one", 40, GREEDY)
        stepped(engine, gpu)
        counts.append(gpu.total)
    assert (counts[1] - counts[0]) / 2 <= 10, gpu.launches + gpu.programs


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_packed_weights_are_multiplied_in_repeated_steps_with_prompts(gpu, form):
    model = model_of(1)
    quantize_model(model, form, torch.bfloat16)
    engine, graphs = engine_of(model)
    submit(engine, "one", 40, GREEDY)
    stepped(engine, gpu)
    assert (graphs.reasons, gpu.syncs.total()) == ({}, 1)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gated_deltanet", {"positions": "none"}, "states of fixed size"),
        ("mla", {"options": {"latent": 32, "rotary_size": 16, "nope_size": 16, "value_size": 16}}, "plans each step"),
        ("attention_sinks", {"options": {"window": 6, "sinks": 2}}, "states of fixed size"),
        ("compressive", {"positions": "none"}, "states of fixed size"),
        ("gqa", {"num_experts": 4, "num_experts_per_tok": 2}, "the host waits"),
    ],
)
def test_what_cannot_be_recorded_says_why_and_runs(gpu, name, options, why):
    engine, graphs = engine_of(model_of(1, name, **options))
    submit(engine, "one", 40, GREEDY)
    stepped(engine, gpu, replayed=0)
    assert why in engine.eager_reasons[PROMPTS]
    assert f"steps with prompts run eagerly, without CUDA graphs: {graphs.reasons[PROMPTS]}" in engine.note
