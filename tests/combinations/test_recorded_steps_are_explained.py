"""`attn explain` says of a decode step what an engine finds that tries to record it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import pytest
import torch
from attn_cli.facts import eager_reason, recorded_steps, step_verdicts
from attn_cli.main import application
from attn_core import AttentionSpec, Capability, Slot, configure, installed
from attn_core.computation import WholeCall
from attn_core.graph_safety import ASKS_THE_HOST
from attn_core.kernels import devices
from attn_core.kernels.attend import BAND, PagedAttendKernel, PagedAttendProblem, PagedAttentionInputs
from attn_core.kernels.base import AtMost, Condition, OneOf
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_engine.graphs import DECODE, PROMPTS, Rerun, StepGraphs, StepLimits
from attn_kernels_cpu.blocks import CpuPaged
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from cases import kind_of
from pretend_cuda import pretended_gpu, to_pretended
from torch import Tensor
from typer.testing import CliRunner

SIZES = {"hidden_size": 64, "num_heads": 4}
CONTEXT = 32
REASONS = {
    "gqa": "gathered before they are read",
    "alibi": "gathered before they are read",
    "mla": "gathered before they are read",
    "compressive": "",
    "lstmn": "",
    "nsa": "",
    "path": "",
}
FIXED = [
    name
    for name in installed().mechanisms.names()
    if (mechanism := installed().mechanisms.get(name)).can(Capability.CAUSAL)
    and all(isinstance(state, Slot) for state in mechanism.state(configure(mechanism, **SIZES)).values())
]
"""Those that remember nothing but states of fixed size."""
WINDOWS: dict[str, dict[str, int]] = {
    "sliding_window": {"window": 6},
    "attention_sinks": {"window": 6, "sinks": 2},
    "block_local": {"block": 6},
    "key_value": {},
}
"""Those that remember rows of a narrow window, some beside the first of all."""


class InPlace(PagedAttendKernel):
    """A kernel for a GPU that is here; it is asked, and never run."""

    name = "in_place"
    summary = "meets rows in place"
    graph_queries = None
    accepts: ClassVar[Mapping[str, Condition]] = {
        "dtype": OneOf("float32"),
        "device": OneOf("cuda"),
        "mask": OneOf(BAND),
        "score": OneOf("scaled_dot"),
        "key_size": AtMost(64),
        "value_size": AtMost(64),
        "query_heads": AtMost(64),
        "key_value_heads": AtMost(64),
    }

    def cost(self, problem: PagedAttendProblem) -> float:
        return 0.01

    def run(self, spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _without_kernels_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU is pretended, the kernel that packed weights of other tests have loaded is not there."""
    monkeypatch.setattr(CpuPaged, "available", lambda _: "it is a CPU's")


@pytest.fixture
def in_place() -> Iterator[InPlace]:
    registry = installed().kernels
    before = dict(registry._items)
    kernel = InPlace()
    registry.register(kernel, "tests")
    yield kernel
    registry._items = before


Found = tuple[str | None, str | None]
"""Why decode steps, and why steps with prompts, are not recorded."""


def found_by_an_engine(name: str, options: Mapping[str, int] = MappingProxyType({})) -> Found:
    torch.manual_seed(0)
    own = {"mechanism": name, "options": options, "positions": "none"}
    config = DecoderConfig(vocab_size=11, max_seq_len=CONTEXT, num_layers=1, **own, **SIZES)
    model = Decoder(config).eval()
    engine = build_engine(model, None, EngineConfig(kv_cache="paged", max_num_seqs=2), kv_cache_tokens=64)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(16, 2))
    engine.submit(Request(id="r", token_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=3, ignore_eos=True)))
    while not engine.idle:
        for output in engine.step():
            assert output.error is None, output.error
    return graphs.reasons.get(DECODE), graphs.reasons.get(PROMPTS)


def explained(name: str, options: Mapping[str, int] = MappingProxyType({})) -> Found:
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, options, max_seq_len=CONTEXT, **SIZES)
    call = {"dtype": "float32", "device": "cpu"}
    return eager_reason(mechanism, config, 1, **call), eager_reason(mechanism, config, 2, **call)


@pytest.mark.parametrize("name", REASONS)
def test_what_an_engine_cannot_record_is_explained_before_with_its_reason(name: str) -> None:
    for reason, said in zip(found_by_an_engine(name), explained(name), strict=True):
        assert reason is not None
        assert said is not None
    (reason, mixed), (said, _) = found_by_an_engine(name), explained(name)
    assert REASONS[name] in (reason or "")
    assert REASONS[name] in (said or "")
    assert mixed is not None


@pytest.mark.parametrize("name", FIXED)
def test_steps_over_states_of_fixed_size_are_recorded_as_explained(name: str) -> None:
    (reason, mixed), (said, mixed_said) = found_by_an_engine(name), explained(name)
    assert reason == said == (ASKS_THE_HOST if installed().mechanisms.get(name).asks_the_host else None)
    assert "states of fixed size" in (mixed or "")
    assert "states of fixed size" in (mixed_said or "")


@pytest.mark.parametrize("name", WINDOWS)
def test_steps_over_narrow_windows_are_recorded_as_explained(name: str) -> None:
    (reason, mixed), (said, mixed_said) = found_by_an_engine(name, WINDOWS[name]), explained(name, WINDOWS[name])
    assert (reason, said) == (None, None)
    assert (mixed is None, mixed_said is None) == (False, False)


def test_every_kind_of_recurrence_is_among_these() -> None:
    assert {"linear", "retnet", "gla", "deltanet", "gated_deltanet", "kda", "mamba2", "lightning", "h2o"} <= {*FIXED}


def test_where_no_kernel_meets_rows_in_place_the_kernels_say_why() -> None:
    gqa = installed().mechanisms.get("gqa")
    rows = recorded_steps(gqa, configure(gqa, **SIZES), dtype="float32", device="cuda")
    assert [row["part"] for row in rows] == ["decode step", "step with prompts"]
    for row in rows:
        assert (row["name"], row["verdict"]) == ("CUDA graph", "runs eagerly")
        assert "triton_paged: " in row["reasons"]


def test_steps_are_recorded_where_a_kernel_meets_rows_in_place_and_plans_nothing_on_the_host(
    in_place: InPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gqa, sinks = (installed().mechanisms.get(name) for name in ("gqa", "attention_sinks"))
    call = {"dtype": "float32", "device": "cuda"}
    for row in recorded_steps(gqa, configure(gqa, **SIZES), **call):
        assert (row["verdict"], row["reasons"]) == ("can be recorded", "")
    assert "states of fixed size" in (eager_reason(sinks, configure(sinks, {"window": 6}, **SIZES), 2, **call) or "")
    wide = configure(sinks, {"window": 5000}, **SIZES)
    assert "are gathered" in (eager_reason(sinks, wide, 1, **call) or "")
    for length in (1, 2):
        assert "encoder's states" in (eager_reason(gqa, configure(gqa, cross=True, **SIZES), length, **call) or "")
    for most, planned in ((1, [False, True]), (0, [True, True])):
        monkeypatch.setattr(InPlace, "graph_queries", most)
        reasons = [eager_reason(gqa, configure(gqa, **SIZES), length, **call) for length in (1, 2)]
        assert [reason is not None for reason in reasons] == planned
        assert reasons[1] == "the kernel in_place plans each step on the host"


def test_an_encoder_has_no_decode_step() -> None:
    shown = [CliRunner().invoke(application(), ["explain", "mha", *more]).output for more in ((), ("--bidirectional",))]
    assert ["CUDA graph" in output for output in shown] == [True, False]


STEPPED = ("linear", "retnet", "lightning", "gla", "deltanet", "kda", "gated_deltanet", "mamba2")
"""Recurrences that ask kernels to compute a decode step over states in place."""


@pytest.mark.parametrize("name", STEPPED)
def test_which_kernel_computes_a_step_over_states_of_fixed_size_is_said_and_why_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = installed().mechanisms.get(name)
    config = configure(mechanism, **SIZES)
    call = {"dtype": "bfloat16", "device": "cuda"}
    own, refused = step_verdicts(mechanism, config, WholeCall(**call))
    assert (own["part"], own["name"], own["verdict"]) == ("decode step", "its own module", "runs")
    assert (refused["name"], refused["verdict"]) == ("triton_recurrent_step", "refuses")
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    (runs,) = step_verdicts(mechanism, config, WholeCall(**call))
    assert (runs["part"], runs["name"], runs["verdict"]) == ("decode step", "triton_recurrent_step", "runs")
    _, refused = step_verdicts(mechanism, config, WholeCall(**call | {"dtype": "float64"}))
    assert "dtype" in refused["reasons"]


def test_mechanisms_over_rows_and_calls_beyond_a_step_say_nothing_of_it() -> None:
    gqa = installed().mechanisms.get("gqa")
    assert step_verdicts(gqa, configure(gqa, **SIZES), WholeCall(dtype="float32")) == []
    shown = [CliRunner().invoke(application(), ["explain", "gla", *more]).output for more in ((), ("--training",))]
    assert ["triton_recurrent_step   " in output for output in shown] == [True, False]


CAUSAL = [name for name in installed().mechanisms.names() if installed().mechanisms.get(name).can(Capability.CAUSAL)]


@pytest.mark.sweep(lambda name: kind_of(name))
@pytest.mark.parametrize("name", CAUSAL)
def test_steps_with_prompts_are_recorded_on_a_gpu_just_where_that_is_explained(name: str) -> None:
    """The GPU is pretended."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    positions = "rotary" if mechanism.can(Capability.ROTARY) else "none"
    shape = {"vocab_size": 11, "max_seq_len": CONTEXT, "num_layers": 1, **SIZES}
    config = DecoderConfig(**shape, mechanism=name, positions=positions)
    with pretended_gpu(), torch.inference_mode():
        model = Decoder(config).to(torch.bfloat16).eval()
        to_pretended(model)
        engine = build_engine(model, None, EngineConfig(max_num_seqs=2, enforce_eager=True), kv_cache_tokens=64)
        graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(16, 2))
        graphs.record_all()
        asked = configure(mechanism, {}, max_seq_len=CONTEXT, causal=True, **SIZES)
        said = eager_reason(mechanism, asked, 2, dtype="bfloat16", device="cuda")
    found = graphs.reasons.get(PROMPTS)
    assert (found is None) == (said is None), (found, said)
