from __future__ import annotations

import pytest
import torch
from artefacts import OTHERS, SHARED_MEMORY, artefact, compiled
from scan_launches import scan_launches

REGISTERS = 255
MATRIX = {"correct", "uncorrect", "remember", "unremember", "recall", "unrecall", "gradient_to_channels"}
GATED_DELTA = {"decay": "head", "delta_rule": True}


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch):
    """Tensors that are never touched stand for those of a GPU."""
    monkeypatch.setattr("attn_kernels_triton.recurrence.compute.interpreted", lambda: True)


def require_ships(launch) -> None:
    """Fail unless a program keeps everything in registers and shared memory, and multiplies on the matrix unit."""
    found, name = artefact(launch), launch.program.__name__
    assert found.spills == 0, (name, found.spills, found.registers)
    assert found.registers <= REGISTERS, name
    assert found.shared <= SHARED_MEMORY, name
    if name in MATRIX and launch.call.query.data.dtype != torch.float32:
        assert found.count("HGMMA") > 0, name


@pytest.mark.parametrize("name", ["remember", "recall", "gradient_to_channels", "go_through"])
def test_on_hopper_programs_of_the_gated_delta_rule_do_not_spill(name):
    require_ships(scan_launches(**GATED_DELTA)[name])


WORST = {
    "channels that fade apart, the delta rule": {"decay": "channel", "delta_rule": True},
    "the same in float32": {"decay": "channel", "delta_rule": True, "dtype": torch.float32},
    "values of odd size": {"decay": "none", "delta_rule": False, "value_size": 129},
}
"""Kinds that need the most registers of their sort."""


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WORST)
def test_on_hopper_no_program_of_the_heaviest_recurrences_spills(name):
    for launch in scan_launches(**WORST[name]).values():
        require_ships(launch)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_on_hopper_no_program_over_narrow_keys_spills(decay, size):
    for launch in scan_launches(decay, delta_rule=True, size=size).values():
        found = artefact(launch)
        assert found.spills == 0, (launch.program.__name__, found.spills)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["remember", "unremember"])
def test_on_hopper_memories_of_wide_keys_do_not_spill(name):
    require_ships(scan_launches(**GATED_DELTA, size=256)[name])


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
def test_every_program_of_a_recurrence_compiles_for_other_gpus(target, monkeypatch):
    monkeypatch.setattr("attn_kernels_triton.recurrence.tiles.SPLIT", OTHERS[target].backend == "cuda")
    launches = scan_launches("channel", delta_rule=True, size=64)
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in launches.values()]
    assert found == [OTHERS[target]] * len(launches)
