from __future__ import annotations

import pytest
import torch
from artefacts import OTHERS, SHARED_MEMORY, artefact, compiled
from rowwise_launches import append_launches, gate_launches, loss_launches, norm_launches, rotary_launches

REGISTERS = 255

SHIPPED = {
    "norm of 4096": lambda: norm_launches(4096),
    "SwiGLU of 14336": lambda: gate_launches("silu"),
    "halves of 128": lambda: rotary_launches(128, 128, interleaved=False),
    "neighbours of 128": lambda: rotary_launches(128, 128, interleaved=True),
    "halves of 128, appended": lambda: append_launches(128, 128, interleaved=False),
    "a quarter of 256, neighbours, appended": lambda: append_launches(256, 64, interleaved=True),
    "losses of 128256 ids": lambda: loss_launches(128256),
}
OTHER_SHIPPED = {
    **{
        f"norm of {width}, {dtype}": lambda width=width, dtype=dtype: norm_launches(width, dtype)
        for width in (1, 64, 128, 768, 2880, 8192)
        for dtype in (torch.bfloat16, torch.float32)
    },
    "GEGLU": lambda: gate_launches("gelu"),
    "GEGLU by tanh, an odd width": lambda: gate_launches("gelu_tanh", 2999),
    "SwiGLU, float32": lambda: gate_launches("silu", dtype=torch.float32),
    "a quarter of 256": lambda: rotary_launches(256, 64, interleaved=False),
    "64 of 192, neighbours, float32, one head": lambda: rotary_launches(
        192, 64, interleaved=True, dtype=torch.float32, heads=1
    ),
    "losses, all at once": lambda: loss_launches(262144, smoothing=0.1, cap=30.0, ignored=0),
    "losses, float32, an odd vocabulary": lambda: loss_launches(50257, torch.float32),
    "losses, float16": lambda: loss_launches(32000, torch.float16),
}


def require_ships(launches) -> None:
    """Fail unless every program of Hopper keeps everything in registers and within shared memory."""
    for launch in launches:
        found, name = artefact(launch), launch.program.__name__
        assert found.spills == 0, (name, found.spills, found.registers)
        assert found.registers <= REGISTERS, name
        assert found.shared <= SHARED_MEMORY, name


@pytest.mark.parametrize("name", SHIPPED)
def test_on_hopper_no_program_on_rows_spills(name):
    require_ships(SHIPPED[name]())


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OTHER_SHIPPED)
def test_on_hopper_no_other_program_on_rows_spills_either(name):
    require_ships(OTHER_SHIPPED[name]())


@pytest.mark.parametrize("name", ["norm of 4096", "SwiGLU of 14336", "halves of 128", "neighbours of 128"])
def test_memory_is_read_and_written_in_wide_pieces(name):
    for launch in SHIPPED[name]():
        found = artefact(launch)
        assert found.count(r"LDG\.E\.(64|128)") > 0, launch.program.__name__
        assert found.count(r"STG\.E\.(64|128)") > 0, launch.program.__name__


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("name", SHIPPED)
def test_programs_on_rows_compile_for_other_gpus(target, name):
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in SHIPPED[name]()]
    assert set(found) == {OTHERS[target]}
