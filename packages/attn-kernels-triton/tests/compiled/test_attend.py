from __future__ import annotations

import pytest
import torch
from artefacts import HOPPER, OTHERS, SHARED_MEMORY, artefact, compiled
from attn_core import Causal, Prefix, SoftmaxWithSink, Window
from launches import launches

PROGRAMS = ("forward", "to_queries", "to_keys")
REGISTERS = 255

SHAPES = {"64": {"size": 64}, "128": {"size": 128}}
WINDOW = {"size": 128, "mask": Window(left=512), "distribution": SoftmaxWithSink()}
LISTED = {"size": 128, "mask": Causal() | Prefix(100)}
WIDER = {
    "256, forward": ({"size": 256}, "forward"),
    "256, to queries": ({"size": 256}, "to_queries"),
    "256, to keys": ({"size": 256}, "to_keys"),
    "128, window and sinks, forward": (WINDOW, "forward"),
    "128, window and sinks, to queries": (WINDOW, "to_queries"),
    "128, blocks of a list, forward": (LISTED, "forward"),
}


def require_ships(program: str, shape: dict) -> None:
    """Fail unless a program of Hopper keeps everything in registers, and products of 16 bits on its matrix unit."""
    found = artefact(launches(**shape)[program])
    assert found.spills == 0
    assert found.registers <= REGISTERS
    assert found.shared <= SHARED_MEMORY
    if shape.get("dtype") != torch.float32:
        # Tiles of 32 keys, the most that gradients of size 256 leave room for, are too few for a warp group.
        assert found.count("HGMMA") > 0 or (program == "to_keys" and shape["size"] > 128 and found.count("HMMA") > 0)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_hopper_nothing_spills_and_products_run_on_the_matrix_unit(shape, program):
    require_ships(program, SHAPES[shape])


def test_on_hopper_gradients_to_queries_of_listed_blocks_do_not_spill():
    require_ships("to_queries", LISTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_on_hopper_wide_heads_and_windows_do_not_spill_either(name):
    shape, program = WIDER[name]
    require_ships(program, shape)


@pytest.mark.slow
@pytest.mark.parametrize("target", OTHERS)
def test_every_program_compiles_for_other_gpus(target):
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in launches(64).values()]
    assert found == [OTHERS[target]] * 4


def test_memory_that_is_loaded_ahead_is_loaded_without_registers():
    assert artefact(launches(64)["forward"]).count("LDGSTS") > 0


def test_what_was_compiled_is_for_hopper():
    assert ".target sm_90a" in compiled(launches(64)["delta"], HOPPER).asm["ptx"]
