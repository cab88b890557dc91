from __future__ import annotations

import pytest
import torch
from artefacts import OTHERS, SHARED_MEMORY, artefact, compiled
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window
from attn_kernels_triton import fp8 as attend
from attn_kernels_triton.attention.forward import empty, inputs_of

REGISTERS = 255


@pytest.fixture(autouse=True)
def as_if_on_hopper(monkeypatch):
    """Tensors that are never touched stand for those of a GPU."""
    monkeypatch.setattr("attn_kernels_triton.checks.interpreted", lambda: True)
    monkeypatch.setattr(attend, "has_copier", lambda device: True)


def launches(size: int, mask, heads: tuple[int, int] = (8, 2)) -> list:
    """The programs that round queries, keys and values, and the one that meets codes."""
    layout = Heads(query=heads[0], key_value=heads[1], key_size=size, value_size=size)
    query, key = (torch.empty(1, 2048, count, size, dtype=torch.bfloat16) for count in heads)
    operands = AttentionInputs(query=query, key=key, value=key)
    plan = attend.checked_plan(AttentionSpec(heads=layout, mask=mask), operands)
    inputs = inputs_of(operands)
    return attend.launches(plan, inputs, attend.empty_coded(inputs, rotated=True), empty(plan, inputs))


SHIPPED = [(128, Causal()), (64, Causal()), (256, Causal()), (128, Full())]
SHIPPED += [(size, Window(left=512)) for size in (64, 128, 256)]


@pytest.mark.parametrize(("size", "mask"), SHIPPED, ids=lambda given: getattr(given, "kind", str(given)))
def test_on_hopper_codes_are_multiplied_as_such_and_nothing_spills(size, mask):
    found = artefact(launches(size, mask)[-1])
    assert found.spills == 0
    assert found.registers <= REGISTERS
    assert found.shared <= SHARED_MEMORY
    assert found.count("QGMMA") > 0
    assert found.count("HGMMA") == 0
    assert found.count("UTMALDG") > 0


@pytest.mark.parametrize("size", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_on_hopper_rotations_run_on_the_matrix_unit_and_do_not_spill(size):
    queries, _, values, _ = map(artefact, launches(size, Full()))
    assert (queries.spills, values.spills) == (0, 0)
    assert queries.count("HGMMA") > 0
    assert queries.shared <= SHARED_MEMORY


@pytest.mark.parametrize("heads", [(8, 2), (8, 8)])
def test_programs_over_codes_compile_for_the_next_chips(heads):
    """No other target takes these codes: sm_80 has none, gfx942 has others."""
    found = [compiled(launch, OTHERS["sm_100"]).metadata.target for launch in launches(64, Causal(), heads)]
    assert found == [OTHERS["sm_100"]] * 4
