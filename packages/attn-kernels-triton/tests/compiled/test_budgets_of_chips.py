"""What programs need on three chips by three Tritons: registers, spilling instructions, a turn of the hottest loop.

The budgets are what the compilers made of these programs. Tiles were chosen on an H200: on sm_80 those of gradients
spill a little, and would be chosen anew on such a chip.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import triton
from artefacts import HOPPER, OTHERS, SLACK, Loop, artefact, require_within
from attn_kernels_triton import products
from attn_kernels_triton.attention import forward as dense
from launches import launches
from paged_launches import paged_launches
from product_launches import DECODED, PROMPTED, product_launches


class Budget(NamedTuple):
    """Registers of a thread, instructions that spill, and what a turn does."""

    registers: int
    spills: int
    turn: Loop


MOST = 255
"""Registers that a thread can have."""

CHIPS = {"sm_90a": HOPPER, **OTHERS}
BUDGETS = {
    ("3.9", "sm_80", "forward"): Budget(215, 0, Loop(719, 2, 3, 128)),
    ("3.9", "sm_80", "to_queries"): Budget(255, 38, Loop(862, 2, 3, 192)),
    ("3.9", "sm_80", "to_keys"): Budget(255, 4, Loop(565, 2, 5, 128)),
    ("3.9", "sm_80", "paged"): Budget(146, 0, Loop(407, 7, 4, 32)),
    ("3.9", "sm_80", "paged int8"): Budget(100, 0, Loop(572, 11, 4, 16)),
    ("3.9", "sm_90a", "forward"): Budget(212, 0, Loop(647, 5, 2, 16)),
    ("3.9", "sm_90a", "to_queries"): Budget(168, 0, Loop(378, 6, 3, 20)),
    ("3.9", "sm_90a", "to_keys"): Budget(225, 0, Loop(542, 12, 5, 24)),
    ("3.9", "sm_90a", "paged"): Budget(110, 0, Loop(423, 7, 4, 32)),
    ("3.9", "sm_90a", "paged int8"): Budget(158, 0, Loop(562, 11, 4, 16)),
    ("3.9", "sm_100", "forward"): Budget(243, 0, Loop(622, 10, 4, 16)),
    ("3.9", "sm_100", "to_queries"): Budget(124, 0, Loop(384, 9, 5, 20)),
    ("3.9", "sm_100", "to_keys"): Budget(128, 0, Loop(646, 14, 7, 24)),
    ("3.9", "sm_100", "paged"): Budget(110, 0, Loop(402, 7, 4, 32)),
    ("3.9", "sm_100", "paged int8"): Budget(160, 0, Loop(559, 11, 4, 16)),
    ("3.6", "sm_80", "forward"): Budget(215, 0, Loop(806, 2, 3, 128)),
    ("3.6", "sm_80", "to_queries"): Budget(255, 30, Loop(874, 2, 3, 192)),
    ("3.6", "sm_80", "to_keys"): Budget(255, 0, Loop(614, 2, 5, 128)),
    ("3.6", "sm_80", "paged"): Budget(156, 0, Loop(489, 9, 4, 32)),
    ("3.6", "sm_80", "paged int8"): Budget(200, 0, Loop(1045, 9, 4, 32)),
    ("3.6", "sm_90a", "forward"): Budget(224, 0, Loop(705, 5, 2, 16)),
    ("3.6", "sm_90a", "to_queries"): Budget(181, 0, Loop(381, 5, 3, 20)),
    ("3.6", "sm_90a", "to_keys"): Budget(250, 0, Loop(515, 11, 5, 24)),
    ("3.6", "sm_90a", "paged"): Budget(122, 0, Loop(463, 9, 4, 32)),
    ("3.6", "sm_90a", "paged int8"): Budget(198, 0, Loop(984, 9, 4, 32)),
    ("3.6", "sm_100", "forward"): Budget(253, 0, Loop(685, 7, 4, 16)),
    ("3.6", "sm_100", "to_queries"): Budget(121, 0, Loop(421, 6, 5, 20)),
    ("3.6", "sm_100", "to_keys"): Budget(121, 0, Loop(692, 11, 7, 24)),
    ("3.6", "sm_100", "paged"): Budget(122, 0, Loop(457, 9, 4, 32)),
    ("3.6", "sm_100", "paged int8"): Budget(198, 0, Loop(960, 9, 4, 32)),
    ("3.9", "sm_80", "decoding with int8"): Budget(80, 0, Loop(273, 2, 3, 16)),
    ("3.9", "sm_80", "decoding with int4"): Budget(80, 0, Loop(458, 2, 6, 16)),
    ("3.9", "sm_80", "prompt with int8"): Budget(180, 0, Loop(569, 2, 3, 64)),
    ("3.9", "sm_80", "prompt with int4"): Budget(161, 0, Loop(648, 2, 6, 64)),
    ("3.9", "sm_90a", "decoding with int8"): Budget(92, 0, Loop(477, 2, 11, 8)),
    ("3.9", "sm_90a", "decoding with int4"): Budget(113, 0, Loop(483, 2, 14, 8)),
    ("3.9", "sm_90a", "prompt with int8"): Budget(249, 0, Loop(536, 3, 5, 8)),
    ("3.9", "sm_90a", "prompt with int4"): Budget(255, 4, Loop(493, 3, 7, 8)),
    ("3.9", "sm_100", "decoding with int8"): Budget(66, 0, Loop(271, 3, 4, 8)),
    ("3.9", "sm_100", "decoding with int4"): Budget(86, 0, Loop(483, 4, 8, 8)),
    ("3.9", "sm_100", "prompt with int8"): Budget(174, 0, Loop(309, 3, 4, 8)),
    ("3.9", "sm_100", "prompt with int4"): Budget(172, 0, Loop(480, 4, 8, 8)),
    ("3.6", "sm_80", "decoding with int8"): Budget(80, 0, Loop(273, 2, 3, 16)),
    ("3.6", "sm_80", "decoding with int4"): Budget(80, 0, Loop(458, 2, 6, 16)),
    ("3.6", "sm_80", "prompt with int8"): Budget(182, 0, Loop(574, 2, 3, 64)),
    ("3.6", "sm_80", "prompt with int4"): Budget(160, 0, Loop(649, 2, 6, 64)),
    ("3.6", "sm_90a", "decoding with int8"): Budget(70, 0, Loop(425, 2, 11, 8)),
    ("3.6", "sm_90a", "decoding with int4"): Budget(101, 0, Loop(440, 2, 14, 8)),
    ("3.6", "sm_90a", "prompt with int8"): Budget(248, 0, Loop(483, 2, 11, 8)),
    ("3.6", "sm_90a", "prompt with int4"): Budget(255, 0, Loop(445, 2, 7, 8)),
    ("3.6", "sm_100", "decoding with int8"): Budget(78, 0, Loop(278, 3, 4, 8)),
    ("3.6", "sm_100", "decoding with int4"): Budget(96, 0, Loop(471, 8, 8, 8)),
    ("3.6", "sm_100", "prompt with int8"): Budget(180, 0, Loop(318, 3, 4, 8)),
    ("3.6", "sm_100", "prompt with int4"): Budget(240, 0, Loop(472, 8, 8, 8)),
    ("3.7", "sm_90a", "forward"): Budget(222, 0, Loop(694, 4, 2, 16)),
    ("3.7", "sm_90a", "to_queries"): Budget(182, 0, Loop(380, 4, 3, 20)),
    ("3.7", "sm_90a", "to_keys"): Budget(248, 0, Loop(515, 9, 5, 24)),
    ("3.7", "sm_90a", "paged"): Budget(158, 0, Loop(410, 9, 4, 32)),
    ("3.7", "sm_90a", "paged int8"): Budget(128, 2, Loop(581, 9, 4, 16)),
    ("3.7", "sm_90a", "decoding with int8"): Budget(89, 0, Loop(412, 2, 11, 8)),
    ("3.7", "sm_90a", "decoding with int4"): Budget(115, 0, Loop(446, 2, 14, 8)),
    ("3.7", "sm_90a", "prompt with int8"): Budget(248, 0, Loop(462, 2, 5, 8)),
    ("3.7", "sm_90a", "prompt with int4"): Budget(255, 0, Loop(451, 2, 7, 8)),
    ("3.7", "sm_80", "forward"): Budget(255, 19, Loop(833, 2, 3, 128)),
    ("3.7", "sm_80", "to_queries"): Budget(255, 34, Loop(872, 2, 3, 192)),
    ("3.7", "sm_80", "to_keys"): Budget(255, 14, Loop(586, 2, 5, 128)),
    ("3.7", "sm_80", "paged"): Budget(153, 0, Loop(437, 9, 4, 32)),
    ("3.7", "sm_80", "paged int8"): Budget(128, 0, Loop(581, 9, 4, 16)),
    ("3.7", "sm_80", "decoding with int8"): Budget(80, 0, Loop(273, 2, 3, 16)),
    ("3.7", "sm_80", "decoding with int4"): Budget(80, 0, Loop(458, 2, 6, 16)),
    ("3.7", "sm_80", "prompt with int8"): Budget(182, 0, Loop(574, 2, 3, 64)),
    ("3.7", "sm_80", "prompt with int4"): Budget(159, 0, Loop(651, 2, 6, 64)),
    ("3.7", "sm_100", "forward"): Budget(254, 0, Loop(656, 7, 4, 16)),
    ("3.7", "sm_100", "to_queries"): Budget(123, 0, Loop(392, 6, 5, 20)),
    ("3.7", "sm_100", "to_keys"): Budget(126, 0, Loop(650, 11, 7, 24)),
    ("3.7", "sm_100", "paged"): Budget(160, 0, Loop(410, 9, 4, 32)),
    ("3.7", "sm_100", "paged int8"): Budget(137, 0, Loop(562, 9, 4, 16)),
    ("3.7", "sm_100", "decoding with int8"): Budget(66, 0, Loop(269, 3, 4, 8)),
    ("3.7", "sm_100", "decoding with int4"): Budget(96, 0, Loop(497, 8, 8, 8)),
    ("3.7", "sm_100", "prompt with int8"): Budget(174, 0, Loop(307, 3, 4, 8)),
    ("3.7", "sm_100", "prompt with int4"): Budget(222, 0, Loop(498, 8, 8, 8)),
}
COMPILER = ".".join(triton.__version__.split(".")[:2])
HERE = {(chip, program): budget for (version, chip, program), budget in BUDGETS.items() if version == COMPILER}


def launch_of(program: str):
    """The launch over heads of 128, over pages the program that reads them, of products the one that multiplies."""
    kind, _, weights = program.partition(" with ")
    if weights:
        return product_launches(weights, {"decoding": DECODED, "prompt": PROMPTED}[kind])[0]
    form = {"paged": "plain", "paged int8": "int8"}.get(program)
    return launches(size=128)[program] if form is None else paged_launches(size=128, form=form)[0]


@pytest.mark.oracle
@pytest.mark.skipif(not HERE, reason="budgets are those of Triton 3.6, 3.7 and 3.9")
@pytest.mark.parametrize(("chip", "program"), HERE)
def test_a_program_needs_no_more_than_its_budget_on_any_chip(chip, program, monkeypatch):
    for module in (dense, products):
        monkeypatch.setattr(module, "has_copier", lambda device: chip != "sm_80")
    found, budget = artefact(launch_of(program), CHIPS[chip]), HERE[chip, program]
    assert found.registers <= min(MOST, SLACK * budget.registers)
    assert found.spills <= budget.spills
    require_within(found.hottest(), budget.turn)


def test_every_chip_has_a_budget_for_every_program_by_all_compilers():
    assert {version for version, _, _ in BUDGETS} == {"3.6", "3.7", "3.9"}
    assert len(BUDGETS) == 3 * 3 * len({program for _, _, program in BUDGETS})
