"""Numbers that are 1 are constants to Triton, and 3.6 loses constants of tuples inside of loops."""

from __future__ import annotations

import pytest
from artefacts import HOPPER, compiled
from attn_core import Causal
from attn_core.dropout import Dropout
from attn_core.kernels.attend import Varlen
from attn_core.masks import Prefix
from attn_core.modifiers import RelativeBias
from launches import launches
from paged_launches import paged_launches


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_programs_over_codes_of_one_head_compile(form):
    for launch in paged_launches(32, form=form, heads=(8, 1)):
        assert compiled(launch, HOPPER).metadata.target == HOPPER


MASKS = {"band": Causal(), "list": Causal() | Prefix(100)}


FURTHER = {
    "biases": {"modifiers": (RelativeBias(clip=1),)},
    "dropout": {"dropout": Dropout(probability=0.5, seed=1)},
}


@pytest.mark.parametrize("name", FURTHER)
def test_packed_texts_biases_and_dropout_of_heads_with_keys_of_their_own_compile(name):
    for launch in launches(64, heads=(8, 8), varlen=Varlen.of((700, 1348)), **FURTHER[name]).values():
        assert compiled(launch, HOPPER).metadata.target == HOPPER


@pytest.mark.parametrize("mask", MASKS)
def test_programs_of_heads_with_keys_of_their_own_compile(mask):
    for launch in launches(64, mask=MASKS[mask], heads=(8, 8)).values():
        assert compiled(launch, HOPPER).metadata.target == HOPPER
