"""What one turn of the innermost loop costs, read from the machine code, so that it cannot grow unseen.

The budgets are what Triton 3.9 made of these programs for Hopper when an H200 had measured them. A change that needs
more is measured again before its budget is raised; one that needs less lowers it.
"""

from __future__ import annotations

import pytest
import triton
from artefacts import Artefact, Loop, artefact, require_within
from attn_core import Full
from attn_kernels_triton.attention import forward as dense
from launches import launches
from paged_launches import paged_launches

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.9."), reason="another compiler makes other loops; budgets are those of 3.9"
)

FULL = {"size": 128, "mask": Full()}
ATTENTION = {
    ("forward", "64"): ({"size": 64}, Loop(instructions=386, barriers=5, waits=2, products=8)),
    ("forward", "128"): ({"size": 128}, Loop(instructions=647, barriers=5, waits=2, products=16)),
    ("to_queries", "128"): ({"size": 128}, Loop(instructions=378, barriers=6, waits=3, products=20)),
    ("to_keys", "128"): ({"size": 128}, Loop(instructions=542, barriers=12, waits=5, products=24)),
}
OTHER_ATTENTION = {
    ("to_queries", "64"): ({"size": 64}, Loop(instructions=348, barriers=6, waits=3, products=12)),
    ("to_keys", "64"): ({"size": 64}, Loop(instructions=493, barriers=12, waits=5, products=16)),
    ("forward", "full"): (FULL, Loop(instructions=677, barriers=5, waits=2, products=16)),
    ("to_queries", "full"): (FULL, Loop(instructions=355, barriers=6, waits=3, products=20)),
    ("to_keys", "full"): (FULL, Loop(instructions=518, barriers=14, waits=27, products=24)),
}
PAGED = {
    "128": (
        {"size": 128},
        [
            ("attend_paged", Loop(instructions=423, barriers=7, waits=4, products=32)),
            ("merge_paged", Loop(instructions=111, barriers=4, waits=0, products=0)),
            ("attend_paged", Loop(instructions=667, barriers=2, waits=4, products=12)),
        ],
    ),
}
OTHER_PAGED = {
    "latents": (
        {"size": 512, "form": "latent", "heads": (128, 1)},
        [("attend_paged", Loop(instructions=665, barriers=7, waits=3, products=104))],
    ),
    "int8": (
        {"size": 128, "form": "int8"},
        [
            ("attend_paged", Loop(instructions=562, barriers=11, waits=4, products=16)),
            ("merge_paged", Loop(instructions=111, barriers=4, waits=0, products=0)),
            ("attend_paged", Loop(instructions=1293, barriers=4, waits=5, products=12)),
        ],
    ),
}


@pytest.fixture(autouse=True)
def _copier(monkeypatch):
    monkeypatch.setattr(dense, "has_copier", lambda device: True)


def require_paged_within(shape: dict, budgets: list[tuple[str, Loop]]) -> None:
    """Fail where a program of a step over pages needs more than its budget."""
    found = paged_launches(**shape)
    assert [launch.program.__name__ for launch in found] == [name for name, _ in budgets]
    for launch, (_, budget) in zip(found, budgets, strict=True):
        require_within(artefact(launch).hottest(), budget)


@pytest.mark.parametrize(("program", "shape"), ATTENTION)
def test_a_turn_of_attention_costs_no_more_than_its_budget(program, shape):
    given, budget = ATTENTION[program, shape]
    require_within(artefact(launches(**given)[program]).hottest(), budget)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("program", "shape"), OTHER_ATTENTION)
def test_a_turn_of_any_other_attention_costs_no_more_either(program, shape):
    given, budget = OTHER_ATTENTION[program, shape]
    require_within(artefact(launches(**given)[program]).hottest(), budget)


@pytest.mark.parametrize("name", PAGED)
def test_a_turn_over_pages_costs_no_more_than_its_budget(name):
    require_paged_within(*PAGED[name])


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OTHER_PAGED)
def test_a_turn_over_any_other_pages_costs_no_more_either(name):
    require_paged_within(*OTHER_PAGED[name])


def test_the_hottest_loop_is_the_one_with_the_products():
    """A listing by hand: a wait for itself, a loop within a loop, and one without a product."""
    text = """
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR41], R5 ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   MOV R1, R2 ;
.L_x_2:
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_3) ;
.L_x_3:
"""
    assert Artefact(0, 0, 0, text).hottest() == Loop(instructions=4, barriers=1, waits=1, products=1)
