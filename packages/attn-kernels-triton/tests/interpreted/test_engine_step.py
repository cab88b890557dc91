"""An engine of a two-layer model computes with these kernels, prefill and decode, what the definition says."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from attn_core.graph_safety import ASKS_THE_HOST
from attn_core.kernels import dispatch, rowwise
from attn_core.plugins.catalog import installed_operation
from attn_engine.graphs import DECODE, PROMPTS
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.products import CodedLinear
from attn_models.quantization.quantize import join_projections, quantize_model
from engines import NEW, generated, generated_in_chunks, model_of, require_defined
from meanings import become_plain
from triton.runtime.errors import OutOfResources

STATIC = ["gqa", "mqa", "sliding_window", "t5_bias", "sink", "qk_norm", "soft_cap", "alibi", "mla"]
RECURRENT = ["retnet", "gla", "gated_deltanet", "linear", "lightning", "deltanet", "kda", "mamba2"]
EAGER = {"compressive": ASKS_THE_HOST, "most_used": "gathered before they are read"}


pytestmark = pytest.mark.usefixtures("few_processors")


@pytest.mark.parametrize("name", STATIC)
def test_recorded_decode_steps_say_what_the_definition_says(name, programs):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    assert (graphs.reasons, graphs.replayed[DECODE]) == ({}, NEW - 1)
    assert "schedule_step" in programs
    assert ("rotate_append" in programs) == (model.config.positions == "rotary")
    assert rowwise.row_result(rowwise.NormKernel, "plain", lambda kernel: kernel, torch.zeros(2, 64)) is not None
    require_defined(model, found)


@pytest.mark.parametrize(("name", "tokens"), [("gqa", 32), *((name, 12) for name in STATIC if name != "mla")])
def test_recorded_steps_with_prompts_say_what_the_definition_says(name, tokens, programs):
    model = model_of(name)
    found, graphs = generated_in_chunks(model, "shared", tokens)
    assert not graphs.reasons
    # All of the first steps: no program over whole prompts was started.
    assert graphs.replayed[PROMPTS] == (1 if tokens == 32 else 2)
    assert "schedule_step" in programs
    assert not [one for one in programs if one.startswith("attend") and one != "attend_paged"]
    require_defined(model, found)


@pytest.mark.parametrize("cache", ["int8", "paged"])
def test_recorded_prompts_over_codes_or_rows_go_on_as_any(cache):
    model = model_of("gqa")
    found, graphs = generated_in_chunks(model, cache, 12)
    before, _ = generated(model, cache)
    assert not graphs.reasons
    assert [[token.id for token in one] for one in found] == [[token.id for token in one] for one in before]


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recorded_steps_over_states_of_fixed_size_say_what_the_definition_says(name, joined, programs):
    model = model_of(name)
    served = copy.deepcopy(model)
    if joined:
        join_projections(served)
    found, graphs = generated(served, "shared")
    assert not graphs.reasons
    assert graphs.replayed[DECODE] >= NEW - 1
    assert programs.count("step_heads") >= 2 * (NEW - 1)
    assert "go_through" not in programs
    require_defined(model, found)


def test_prompts_that_begin_together_take_one_program_a_layer(programs):
    model = model_of("gqa")
    found, _ = generated(model, "shared")
    whole = [name for name in programs if name.startswith("attend") and name != "attend_paged"]
    assert len(whole) == len(model.blocks)
    require_defined(model, found)


@pytest.mark.parametrize("name", ["gqa", "qk_norm"])
def test_projections_that_were_joined_say_the_same(name):
    model = model_of(name)
    before, _ = generated(model, "shared")
    joined = copy.deepcopy(model)
    join_projections(joined)
    after, graphs = generated(joined, "shared")
    assert not graphs.reasons
    assert [[token.id for token in tokens] for tokens in after] == [[token.id for token in tokens] for tokens in before]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_weights_are_multiplied_as_they_lie_by_programs_alone(form, programs):
    packed = model_of("gqa")
    quantize_model(packed, form, kernel=f"triton_{form}")
    found, graphs = generated(packed, "shared")
    assert (graphs.reasons, graphs.replayed[DECODE]) == ({}, NEW - 1)
    products = [module for module in packed.modules() if isinstance(module, CodedLinear)]
    assert len(products) == 4 * len(packed.blocks) + (form == "int8")  # of int4 the head is int8, by the cheapest
    assert programs.count("multiply_codes") >= len(products) * NEW
    become_plain(packed)
    defined, _ = generated(packed, "shared")
    for tokens, others in zip(found, defined, strict=True):
        expected = {token.id: token.logprob for token in others[0].top_logprobs}
        for token in tokens[0].top_logprobs[:2]:
            assert abs(token.logprob - expected[token.id]) < 0.03  # inputs are rounded to bfloat16


@pytest.mark.parametrize("name", EAGER)
def test_mechanisms_without_a_static_step_run_as_ever_and_say_why(name):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    assert not graphs.replayed
    assert EAGER[name] in graphs.reasons[DECODE]
    require_defined(model, found)


@pytest.fixture
def uncompilable(monkeypatch, caplog):
    """A chip for which no program compiles; gives what is said of that."""
    tried = []

    def run(self, _):
        tried.append(self.program.__name__)
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(dispatch, "_said", set())
    installed_operation.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield lambda: [found for record in caplog.records if "cannot run on" in (found := record.getMessage())]
    assert tried
    installed_operation.cache_clear()


@pytest.mark.parametrize("name", ["gqa", "mla", "retnet", "gated_deltanet"])
def test_where_no_program_compiles_other_kernels_compute_and_each_is_said_once(name, uncompilable):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    require_defined(model, found)
    # What then computes states of fixed size asks the device for the same in every step, and is recorded.
    assert (graphs.replayed[DECODE] >= NEW - 1) == (name in RECURRENT)
    said = uncompilable()
    kernels = [line.split()[1] for line in said]
    assert len(set(kernels)) == len(kernels)
    assert "triton_rms_norm" in kernels
    assert {"gqa": "triton_paged", "mla": "triton_latent"}.get(name, "triton_chunked") in kernels
    assert all("shared memory" in line for line in said)
