"""Numbers that are 1 are constants to Triton, and 3.6 loses constants of tuples inside of loops."""

from __future__ import annotations

import pytest
from artefacts import HOPPER, compiled
from attn_core import Causal, Prefix
from launches import launches

MASKS = {"band": Causal(), "list": Causal() | Prefix(100)}


@pytest.mark.parametrize("mask", MASKS)
def test_programs_of_heads_with_keys_of_their_own_compile(mask):
    for launch in launches(64, mask=MASKS[mask], heads=(8, 8)).values():
        assert compiled(launch, HOPPER).metadata.target == HOPPER
