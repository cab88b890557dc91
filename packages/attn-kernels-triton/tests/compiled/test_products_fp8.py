"""What products with weights in e4m3 become on chips that are only compiled for."""

from __future__ import annotations

import pytest
import torch
from artefacts import HOPPER, OTHERS, SHARED_MEMORY, artefact, compiled
from attn_kernels_triton import products
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.products import E4M3, Held, linear_launches
from attn_kernels_triton.products_fp8 import GROUP, Rounded, round_launch
from product_launches import DECODED, PROMPTED, WIDTH
from triton.backends.compiler import GPUTarget

CHIPS = {"sm_90a": HOPPER, **OTHERS, "sm_89": GPUTarget("cuda", 89, 32)}
KNOWING = {"sm_89": "QMMA", "sm_90a": "QGMMA", "sm_100": r"UTCQMMA"}
"""Chips that multiply e4m3, and the instruction that does."""
COPIERS = ("sm_90a", "sm_100")
COUNTS, GROUPS = (DECODED, PROMPTED), (None, GROUP)


def launches(chip: str, count: int, group: int | None, dtype: torch.dtype) -> list[Launch]:
    """The programs over so many rows of a type, e4m3 or 16 bits, as on a chip; tensors are never touched."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products, "has_copier", lambda _: chip in COPIERS)
        patched.setattr(products, "has_e4m3", lambda _: chip in KNOWING)
        groups = WIDTH // GROUP
        steps = torch.empty(WIDTH, groups) if group else torch.empty(WIDTH)
        codes = torch.empty(WIDTH, WIDTH, dtype=torch.int8)
        held = Held(codes, steps, None, None, torch.empty(WIDTH), WIDTH, 8, group, e4m3=True)
        out = torch.empty(count, WIDTH, dtype=torch.bfloat16 if dtype == E4M3 else dtype)
        scales = torch.empty(count, groups if group else 1) if dtype == E4M3 else None
        return linear_launches(torch.empty(count, WIDTH, dtype=dtype), held, out, scales)


@pytest.mark.sweep(lambda chip, **_: chip)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("chip", KNOWING)
def test_codes_of_rows_and_weights_are_multiplied_as_such_and_nothing_spills(chip, count, group):
    found = artefact(launches(chip, count, group, E4M3)[0], CHIPS[chip])
    assert found.count(KNOWING[chip]) > 0
    assert found.count("HGMMA|HMMA|UTCHMMA") == 0
    assert found.spills == 0
    assert found.shared <= (SHARED_MEMORY if chip in COPIERS else 99 * 1024)
    assert found.count(r"LDGSTS\.E\.(64|BYPASS\.128|BYPASS\.LTC128B\.128|128)") > 0


@pytest.mark.sweep(lambda chip, **_: chip)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_90a", "sm_100"])
def test_weights_alone_are_widened_on_their_way_and_small_ones_are_not_lost(chip, count, group):
    found = artefact(launches(chip, count, group, torch.bfloat16)[0], CHIPS[chip])
    assert found.hottest().products > 0
    assert found.count("QGMMA|QMMA|UTCQMMA") == 0
    # By half floats where the chip makes these of e4m3; else as bits of float32, in which small numbers are subnormal.
    assert (found.count(r"F2FP\.F16\.E4M3") > 0) == (chip in KNOWING)
    assert found.count(r"FMUL\.FTZ") == 0
    # Of prompts on sm_80, the compiler takes half of the registers, and keeps a number beside them outside of the loop.
    assert found.spills <= (8 if (chip, count, group) == ("sm_80", PROMPTED, None) else 0)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("chip", KNOWING)
def test_rows_are_rounded_by_the_chip_and_do_not_spill(chip, group):
    rows = torch.empty(DECODED, WIDTH, dtype=torch.bfloat16)
    into = Rounded(torch.empty(DECODED, WIDTH, dtype=E4M3), torch.empty(DECODED, WIDTH // GROUP if group else 1))
    found = artefact(round_launch(rows, into, group), CHIPS[chip])
    assert (found.spills, found.registers <= 128) == (0, True)
    assert found.count(r"F2FP\.SATFINITE\.E4M3") > 0


def test_sums_of_codes_are_added_in_float32_turn_by_turn():
    """On Hopper the matrix unit adds with 14 bits: no program hands it a sum that goes on."""
    for group in GROUPS:
        text = compiled(launches("sm_90a", DECODED, group, E4M3)[0], HOPPER).asm["ttgir"]
        (product,) = [line for line in text.splitlines() if "warp_group_dot " in line]
        started = product.split("warp_group_dot ")[1].split(",")[2].split()[0]
        assert f"{started} = arith.constant dense<0.0" in text, product


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("count", COUNTS)
def test_weights_alone_compile_for_chips_of_others_whose_e4m3_is_another(count, group):
    for dtype in (torch.bfloat16, torch.float16):
        launch = launches("gfx942", count, group, dtype)[0]
        assert compiled(launch, CHIPS["gfx942"]).metadata.target == CHIPS["gfx942"]
