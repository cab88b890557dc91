"""What products with weights of few bits become on chips that are only compiled for."""

from __future__ import annotations

import pytest
import torch
from artefacts import HOPPER, OTHERS, SHARED_MEMORY, artefact, compiled
from attn_core.kernels.linear import BLOCK_FORMATS
from product_launches import DECODED, PROMPTED, product_launches

FORMS = ["int8", "int4", *BLOCK_FORMATS]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_decoding_shares_inputs_and_reads_weights_in_wide_pieces_ahead_of_the_matrix_unit(form):
    multiply, add = product_launches(form, DECODED)
    assert (multiply.program.__name__, add.program.__name__) == ("multiply_codes", "add_parts")
    found = artefact(multiply)
    assert (found.spills, found.registers <= 128) == (0, True)
    assert found.shared <= SHARED_MEMORY // 4  # four programs at a time
    assert found.count(r"LDGSTS\.E\.(64|BYPASS\.128|BYPASS\.LTC128B\.128|128)") > 0
    assert found.hottest().products > 0
    assert artefact(add).spills == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, PROMPTED])
def test_codes_are_taken_apart_in_every_program(form, count):
    """Triton 3.6 loses numbers and constants of tuples inside of loops: codes of four bits were read as of eight."""
    text = compiled(product_launches(form, count)[0], HOPPER).asm["ttir"]
    products = [line for line in text.splitlines() if "tt.dot" in line]
    halves = form not in ("int8", "q8_0", "q6_k")
    assert len(products) == 1 + halves
    assert ("arith.shrui" in text) == halves


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [DECODED, PROMPTED])
@pytest.mark.parametrize("target", OTHERS)
def test_products_compile_for_other_gpus_too(form, count, target):
    for launch in product_launches(form, count, torch.float16):
        assert compiled(launch, OTHERS[target]).metadata.target == OTHERS[target]
