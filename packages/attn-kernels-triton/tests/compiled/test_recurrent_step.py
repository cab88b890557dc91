"""Programs of decode steps over states in slots keep everything in registers, on three chips."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from artefacts import HOPPER, OTHERS, SHARED_MEMORY, artefact, compiled
from attn_kernels_triton.recurrence.step import plan_of
from step_launches import SPECS, recurrent_step_launches

CHIPS = {"sm_90a": HOPPER, **{name: target for name, target in OTHERS.items() if target.backend == "cuda"}}
REGISTERS = 255


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch):
    """Tensors that are never touched stand for those of a GPU."""
    monkeypatch.setattr("attn_kernels_triton.recurrence.step_checks.interpreted", lambda: True)


def require_ships(launches, target=HOPPER) -> None:
    """Fail unless every program keeps everything in registers and within shared memory."""
    for launch in launches:
        found, name = artefact(launch, target), launch.program.__name__
        assert found.spills == 0, (name, found.spills, found.registers)
        assert found.registers <= REGISTERS, name
        assert found.shared <= SHARED_MEMORY, name


PROGRAMS = {
    "linear": ["step_heads", "finish_rows"],
    "retnet": ["step_heads", "finish_rows"],
    "lightning": ["step_heads", "finish_rows"],
    "gla": ["step_heads"],
    "deltanet": ["step_heads"],
    "kda": ["step_heads"],
    "gated_deltanet": ["convolve_rows", "step_heads"],
    "mamba2": ["convolve_rows", "step_heads", "finish_rows"],
}
"""Of heads of 128; those of retnet have values of 256, and linear memories a sum of keys."""
FITTING = {"linear": {"key_size": 64, "value_size": 64}, "retnet": {"key_size": 64, "value_size": 128}}
"""Sizes of heads at which one program does with whole memories."""


@pytest.mark.parametrize("name", SPECS)
def test_on_hopper_no_program_of_a_step_spills(name):
    launches = recurrent_step_launches(SPECS[name])
    assert [launch.program.__name__ for launch in launches] == PROGRAMS[name]
    require_ships(launches)


@pytest.mark.parametrize("name", FITTING)
def test_memories_that_fit_take_one_program(name):
    spec = dataclasses.replace(SPECS[name], **FITTING[name])
    launches = recurrent_step_launches(spec)
    assert [launch.program.__name__ for launch in launches] == ["step_heads"]
    require_ships(launches)


@pytest.mark.parametrize("name", ["deltanet", "lightning", "gla"])
def test_memories_are_read_and_written_in_wide_pieces(name):
    launch = next(launch for launch in recurrent_step_launches(SPECS[name]) if launch.program.__name__ == "step_heads")
    spec, found = SPECS[name], artefact(launch)
    held = launch.call.tile.key_width.value * plan_of(spec).columns
    each = held // (launch.warps * 32 * 4)
    assert found.count(r"LDG\.E\.128") >= each
    assert found.count(r"STG\.E\.128") == each
    # Rows of queries, keys and gates are no more than what each thread reads of its memory, a few times.
    assert found.count("LDG") <= 5 * each + 16


OTHER = {
    "kda of 64": ("kda", {"key_size": 64, "value_size": 64}),
    "kda of 32": ("kda", {"key_size": 32, "value_size": 32}),
    "kda of odd sizes": ("kda", {"key_size": 100, "value_size": 99}),
    "two taps": ("deltanet", {"taps": 2}),
    "eight taps": ("deltanet", {"taps": 8}),
    "linear of 64": ("linear", {"key_size": 64, "value_size": 64}),
    "linear, wide values": ("linear", {"key_size": 64, "value_size": 128}),
    "linear of 256": ("linear", {"key_size": 256, "value_size": 256}),
    "xPos, halves": ("retnet", {"rotary": "halves", "decay": "channel", "key_size": 64, "value_size": 128}),
    "gated_deltanet of 256": ("gated_deltanet", {"key_size": 256, "value_size": 256}),
    "gla, wide": ("gla", {"key_size": 256, "value_size": 512}),
    "mamba2, many heads": ("mamba2", {"key_size": 16, "value_size": 64, "num_heads": 128, "norm_heads": 128}),
    "mamba2, a group a head": ("mamba2", {"num_key_heads": 16, "norm_heads": 1, "value_size": 64}),
}
"""Other sizes, by what is changed."""
EVERY = {**{name: (name, {}) for name in SPECS}, **OTHER}


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", EVERY)
def test_no_program_of_any_size_spills_on_any_chip(name, chip, dtype):
    base, changes = EVERY[name]
    require_ships(recurrent_step_launches(dataclasses.replace(SPECS[base], **changes), dtype), CHIPS[chip])


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SPECS)
def test_every_program_of_a_step_compiles_for_amd(name):
    for launch in recurrent_step_launches(SPECS[name]):
        assert compiled(launch, OTHERS["gfx942"]).metadata.target == OTHERS["gfx942"]


@pytest.mark.parametrize("name", ["gla", "kda", "mamba2"])
def test_steps_of_one_head_and_one_request_compile_for_numbers_that_are_1_are_constants(name, monkeypatch):
    monkeypatch.setattr("step_launches.REQUESTS", 1)
    single = {"num_heads": 1, "num_key_heads": 1, "norm_heads": 1}
    for launch in recurrent_step_launches(dataclasses.replace(SPECS[name], **single)):
        assert compiled(launch, HOPPER).metadata.target == HOPPER
