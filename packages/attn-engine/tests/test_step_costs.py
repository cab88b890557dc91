"""What a decode step asks of a GPU, counted on one that is pretended: waits of the host, copies to it, kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from attn_core.kernels.devices import Gpu
from attn_engine import EngineConfig, Request, SamplingParams
from attn_engine.build import build_engine
from attn_engine.graphs import DECODE, Rerun, StepGraphs, StepLimits
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import join_projections, quantize_model
from attn_schema import StructuredOutput
from attn_schema.decoder import AttentionChoice, DecoderConfig
from pretend_cuda import H200, PretendCuda, pretended_gpu, to_pretended
from pretended import gpu, require_triton
from small_models import Bytes

__all__ = ["gpu"]

BATCH = 4
CHARACTERS = Bytes(bytes(range(128)))
GREEDY = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.9, top_k=20, ignore_eos=True)


def model_of(layers: int, mechanism: str = "gqa", **options) -> Decoder:
    """A model as those of Llama's family, small, on the pretended GPU."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=128,
        max_seq_len=256,
        hidden_size=64,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2 if mechanism == "gqa" else None,
        norm="rms",
        feed_forward="swiglu",
        bias=False,
        mechanism=mechanism,
        **({"positions": "rotary"} | options),
    )
    model = Decoder(config).to(torch.bfloat16).eval()
    to_pretended(model)
    return model


Asked = SamplingParams | Sequence[SamplingParams]
"""Of all sequences, or of each."""


def decoding(model: Decoder, gpu: PretendCuda, params: Asked, steps: int = 2, ahead: bool = False, **more):
    """An engine whose sequences have taken so many steps, and whose counts begin anew; its steps may be launched
    `ahead`."""
    config = EngineConfig(max_num_seqs=BATCH, enforce_eager=True, async_scheduling=ahead)
    engine = build_engine(model, CHARACTERS, config, kv_cache_tokens=1024)
    engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(0, BATCH))
    engine.warm_up()
    for number in range(BATCH):
        prompt = tuple(range(3, 12 + number))
        one = params if isinstance(params, SamplingParams) else params[number]
        engine.submit(Request(id=str(number), token_ids=prompt, params=one, **more))
    for _ in range(steps):
        engine.step()
    gpu.reset()
    return engine


def step(engine) -> None:
    """One step, in which every sequence gets a token."""
    outputs = engine.step()
    assert [output.error for output in outputs] == [None] * BATCH


@pytest.mark.parametrize(("params", "copies"), [(GREEDY, 1), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_the_host_waits_once_a_step_and_copies_what_each_step_brings(gpu, params, copies):
    engine = decoding(model_of(2), gpu, params)
    for _ in range(3):
        gpu.reset()
        step(engine)
        assert gpu.syncs.total() == 1
        assert gpu.copies == copies


OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "frequency penalty": {"frequency_penalty": 0.4},
    "presence penalty": {"presence_penalty": 0.4},
    "logit bias": {"logit_bias": {5: 1.0, 9: -2.0}},
    "least number of tokens": {"min_new_tokens": 30, "ignore_eos": False},
    "log probabilities": {"top_logprobs": 3},
    "a log probability": {"top_logprobs": 0},
    "grammar": {"structured_output": StructuredOutput(regex="[a-z]{20,30}"), "ignore_eos": False},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
    "typical p": {"temperature": 0.8, "typical_p": 0.7},
    "a seed": {"temperature": 0.8, "seed": 7},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.4,
        "logit_bias": {5: 1.0},
        "top_logprobs": 2,
    },
}
"""Every option of sampling, beside greedy decoding."""
TOGETHER = {
    "one kind": lambda option: [option] * BATCH,
    "beside greedy": lambda option: [option, GREEDY] * (BATCH // 2),
    "beside sampled and scored": lambda option: [SAMPLED, option, GREEDY.replace(top_logprobs=1), option],
}


def option_of(name: str) -> SamplingParams:
    if name == "grammar":
        pytest.importorskip("llguidance")
    return GREEDY.replace(num_speculative_tokens=0, **OPTIONS[name])


def waits(gpu: PretendCuda, engine) -> Counter[str]:
    """For what the host waits in one step."""
    gpu.reset()
    step(engine)
    return Counter(gpu.syncs)


@pytest.mark.sweep(lambda name, mixed: name)
@pytest.mark.parametrize("mixed", TOGETHER)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_host_waits_once_a_step_whatever_is_asked_of_sampling(gpu, name, mixed):
    engine = decoding(model_of(1), gpu, TOGETHER[mixed](option_of(name)), steps=1)  # the first decode step is next
    for _ in range(3):
        assert waits(gpu, engine).total() == 1
        # Which rows are asked for their likeliest token alone is sent before.
        assert gpu.copies == (3 if mixed == "beside greedy" else 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_the_first_token_waits_no_more_than_greedy_decoding_does(gpu, name):
    asked = (GREEDY, option_of(name), [GREEDY, option_of(name)] * 2)
    seen = [waits(gpu, decoding(model_of(1), gpu, params, steps=0)) for params in asked]
    assert seen[0]["tolist"] == 1
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("which", ["suppress_tokens", "begin_suppress_tokens"])
def test_suppressed_tokens_cost_no_wait(gpu, which):
    tokens = {which: frozenset({3, 5})}
    assert waits(gpu, decoding(model_of(1), gpu, GREEDY, **tokens)).total() == 1
    first = [waits(gpu, decoding(model_of(1), gpu, GREEDY, steps=0, **more)) for more in ({}, tokens)]
    assert first[0] == first[1]


def test_rows_whose_head_finds_the_likeliest_token_are_fetched_with_the_others(gpu):
    model = model_of(1)
    kept = model.logits
    model.greedy_tokens = lambda hidden: kept(hidden).argmax(-1)
    engine = decoding(model, gpu, [GREEDY, SAMPLED, GREEDY, GREEDY.replace(top_logprobs=2)])
    assert waits(gpu, engine) == {"tolist": 1}


@pytest.mark.parametrize("name", ["greedy", "sampled", *(name for name in OPTIONS if name != "grammar")])
def test_the_host_waits_for_a_step_when_the_next_is_launched(gpu, monkeypatch, name):
    """What the device was asked when the host begins to wait, and what it is asked afterwards."""
    params = {"greedy": GREEDY, "sampled": SAMPLED}.get(name) or option_of(name)
    copies = 1 if name == "greedy" else 2
    engine = decoding(model_of(2), gpu, params, ahead=True)
    waited = []
    wait = PretendCuda.wait

    def noted(counter, *given):
        waited.append((gpu.total, gpu.copies))
        wait(counter, *given)

    monkeypatch.setattr(PretendCuda, "wait", noted)
    for _ in range(3):
        waited.clear()
        gpu.reset()
        step(engine)
        assert gpu.syncs == Counter(event=1)
        assert waited == [(gpu.total, copies)]
        assert gpu.programs["schedule_step"] == 1
    assert engine._async.launched_ahead >= 3


def test_a_layer_takes_ten_kernels(gpu):
    counts = []
    for layers in (1, 3):
        model = model_of(layers)
        join_projections(model)
        engine = decoding(model, gpu, GREEDY)
        step(engine)
        counts.append(gpu.total)
    assert (counts[1] - counts[0]) / 2 <= 10, gpu.launches + gpu.programs


def kernels_a_layer(gpu: PretendCuda, form: str, rounded: int = 0) -> float:
    """Kernels of a decode step for each layer of a model with packed weights, whose joined projections and head are one
    program each, and as many more where rows are `rounded`, but for those of the head, which is in int8."""
    counts = []
    for layers in (1, 3):
        model = model_of(layers)
        quantize_model(model, form, torch.bfloat16)
        engine = decoding(model, gpu, GREEDY)
        seen = []
        for _ in range(2):
            gpu.reset()
            step(engine)
            seen.append([(name, grid) for name, grid, _ in gpu.grids])
        assert seen[0] == seen[1]
        assert not engine.eager_reasons
        assert (gpu.syncs.total(), gpu.copies) == (1, 1)
        assert gpu.programs["multiply_codes"] == 4 * layers + 1, gpu.programs
        assert gpu.programs["round_rows"] == 4 * layers * rounded
        assert not {"mm", "addmm", "linear", "bmm", "matmul"} & gpu.launches.keys(), gpu.launches
        counts.append(gpu.total)
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_weights_are_multiplied_by_one_program_each_and_cost_no_more_kernels_waits_or_copies(gpu, form):
    assert kernels_a_layer(gpu, form) <= 10


@pytest.mark.parametrize(
    ("chip", "rounded"), [(H200, 1), (Gpu("NVIDIA A100", (8, 0)), 0)], ids=["rows in FP8 too", "weights alone"]
)
def test_weights_in_fp8_take_one_program_a_product_and_one_more_where_rows_are_rounded(chip, rounded):
    require_triton()
    with pretended_gpu(chip) as gpu, torch.inference_mode():
        assert kernels_a_layer(gpu, "fp8", rounded) <= 10 + 4 * rounded


def test_a_step_that_repeats_starts_the_same_programs_over_the_same_inputs(gpu):
    engine = decoding(model_of(2), gpu, GREEDY)
    seen = []
    for _ in range(3):
        gpu.reset()
        step(engine)
        seen.append([(name, grid) for name, grid, _ in gpu.grids])
    assert seen[0] == seen[1] == seen[2]
    assert gpu.programs["schedule_step"] == 1


def test_steps_of_all_sizes_are_recorded_before_the_first_request(gpu):
    model = model_of(1)
    engine = build_engine(model, None, EngineConfig(max_num_seqs=6, enforce_eager=True), kv_cache_tokens=1024)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(0, 6))
    engine.warm_up()
    assert (graphs.reasons, sorted(graphs._graphs)) == ({}, [(DECODE, size) for size in (1, 2, 4, 6)])
    assert engine._store.usage().tokens == 0


def require_repeated(engine, gpu):
    """Three steps start the same programs and operations, wait once and copy once each."""
    seen = []
    for _ in range(3):
        gpu.reset()
        step(engine)
        assert (gpu.syncs.total(), gpu.copies) == (1, 1)
        # Beside the step, a copy of the states at the end of a block is kept for those that begin alike.
        kernels = {kernel: count for kernel, count in gpu.launches.items() if kernel != "clone"}
        seen.append(([(program, grid) for program, grid, _ in gpu.grids], kernels))
    assert not engine.eager_reasons
    assert seen[0] == seen[1] == seen[2]


FIXED = {
    "linear": 8,
    "retnet": 8,
    "deltanet": 8,
    "gated_deltanet": 8,
    "gla": 9,
    "lightning": 9,
    "kda": 10,
    "mamba2": 10,
}
"""Mechanisms that remember states of fixed size, with the kernels of a layer at most."""


def recurrent_model(layers: int, name: str) -> Decoder:
    return model_of(layers, name, positions="rotary" if name == "retnet" else "none")


@pytest.mark.parametrize("name", FIXED)
def test_a_layer_over_states_of_fixed_size_takes_no_more_kernels_than_its_bound(gpu, name):
    counts = []
    for layers in (1, 3):
        model = recurrent_model(layers, name)
        join_projections(model)
        engine = decoding(model, gpu, GREEDY)
        step(engine)
        assert (engine.eager_reasons, gpu.syncs.total(), gpu.copies) == ({}, 1, 1)
        assert gpu.programs["step_heads"] == layers
        assert gpu.launches["index_copy_"] == 0
        counts.append(gpu.total)
    assert (counts[1] - counts[0]) / 2 <= FIXED[name], gpu.launches + gpu.programs


@pytest.mark.parametrize("name", FIXED)
def test_a_step_over_states_of_fixed_size_repeats_over_the_same_memory(gpu, name):
    engine = decoding(recurrent_model(2, name), gpu, GREEDY)
    require_repeated(engine, gpu)


@pytest.mark.parametrize("name", FIXED)
def test_states_of_fixed_size_are_read_and_written_where_the_store_keeps_them(gpu, name):
    engine = decoding(recurrent_model(2, name), gpu, GREEDY)
    memory = engine._store._slots._memory
    step(engine)
    given = [set(pointers) for program, _, pointers in gpu.grids if program == "step_heads"]
    kept = [fields["S"].data_ptr() for fields in memory.values()]
    assert len(given) == len(kept) == 2
    assert all(address in pointers for address, pointers in zip(kept, given, strict=True))


def test_a_model_of_states_of_fixed_size_and_rows_is_recorded_whole(gpu):
    pattern = tuple(AttentionChoice(mechanism=name) for name in ("gated_deltanet", "mha"))
    engine = decoding(model_of(2, "mha", pattern=pattern, positions="learned"), gpu, GREEDY)
    step(engine)
    assert (engine.eager_reasons, gpu.syncs.total(), gpu.copies) == ({}, 1, 1)
    assert gpu.programs["step_heads"] == gpu.programs["schedule_step"] == 1


@pytest.mark.parametrize(
    ("name", "options"), [("attention_sinks", {"window": 6, "sinks": 2}), ("block_local", {"block": 6}), ("fixed", {})]
)
def test_a_step_that_gathers_a_narrow_window_waits_once_and_repeats(gpu, name, options):
    engine = decoding(model_of(2, name, options=options), gpu, GREEDY)
    require_repeated(engine, gpu)


def test_a_mechanism_that_cannot_be_recorded_says_so_and_runs(gpu):
    engine = decoding(model_of(1, "compressive", positions="none"), gpu, GREEDY)
    step(engine)
    assert "number of cached tokens" in engine.eager_reasons[DECODE]
    assert engine.eager_reasons[DECODE] in engine.note


def test_a_model_for_whose_step_the_host_waits_says_so_and_runs(gpu):
    """Experts are chosen by numbers that the host reads."""
    engine = decoding(model_of(1, num_experts=4, num_experts_per_tok=2), gpu, GREEDY)
    step(engine)
    assert any(part in engine.eager_reasons[DECODE] for part in ("the host waits", "is copied"))
