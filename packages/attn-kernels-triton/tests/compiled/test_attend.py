from __future__ import annotations

import pytest
import torch
from artefacts import HOPPER, OTHERS, SHARED_MEMORY, artefact, compiled
from attn_core import Causal, Full, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.dropout import Dropout
from attn_core.kernels.attend import Varlen
from attn_core.masks import Prefix
from attn_core.modifiers import Alibi, SoftCap, T5Bias
from attn_kernels_triton.attention import forward as dense
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.tuning.candidates import CANDIDATES, PAIRED
from launches import launches

PROGRAMS = ("forward", "to_queries", "to_keys")
REGISTERS = 255

SHAPES = {"64": {"size": 64}, "128": {"size": 128}}
WINDOW = {"size": 128, "mask": Window(left=512), "distribution": SoftmaxWithSink()}
CAPPED = {"size": 128, "modifiers": (SoftCap(cap=30.0),)}
LISTED = {"size": 128, "mask": Causal() | Prefix(100)}
PACKED = {"size": 128, "varlen": Varlen.of((700, 48, 1300))}
DROPPED = {"size": 128, "dropout": Dropout(probability=0.1, seed=3)}
EVERYTHING = {
    **PACKED,
    "mask": Window(left=512),
    "modifiers": (SoftCap(cap=30.0), Alibi()),
    "distribution": SoftmaxWithSink(),
}
ALL_BIASED = {**EVERYTHING, "modifiers": (SoftCap(cap=30.0), T5Bias())}
ALL_DROPPED = {**EVERYTHING, **DROPPED}
FURTHER = {"all with biases": ALL_BIASED, "all with dropout": ALL_DROPPED}
WIDER = {
    "256, forward": ({"size": 256}, "forward"),
    "256, to queries": ({"size": 256}, "to_queries"),
    "256, to keys": ({"size": 256}, "to_keys"),
    "128, window and sinks, forward": (WINDOW, "forward"),
    "128, soft cap, forward": (CAPPED, "forward"),
    "128, soft cap, to queries": (CAPPED, "to_queries"),
    "128, soft cap, to keys": (CAPPED, "to_keys"),
    "128, window and sinks, to keys": (WINDOW, "to_keys"),
    "128, blocks of a list, to keys": (LISTED, "to_keys"),
    "128, window and sinks, to queries": (WINDOW, "to_queries"),
    "128, blocks of a list, forward": (LISTED, "forward"),
    **{
        f"{shape['size']}, {name}, {program}": (shape, program)
        for name, one in FURTHER.items()
        for shape in (one, {**one, "size": 64})
        for program in PROGRAMS
    },
    "64, all with biases, to biases": ({**ALL_BIASED, "size": 64}, "to_biases"),
    "128, all with biases, to biases": (ALL_BIASED, "to_biases"),
    "128, packed, to keys": (PACKED, "to_keys"),
    "128, blocks of a list, dropout, to queries": ({**LISTED, **DROPPED}, "to_queries"),
    "256, packed, forward": ({**PACKED, "size": 256}, "forward"),
    "256, packed, to keys": ({**PACKED, "size": 256}, "to_keys"),
}


@pytest.fixture(autouse=True)
def copier(monkeypatch):
    """Whether tensors that are never touched stand for those of a chip that copies tiles by itself."""

    def set_to(present: bool) -> None:
        monkeypatch.setattr(dense, "has_copier", lambda device: present)

    set_to(True)
    return set_to


def require_ships(program: str, shape: dict) -> None:
    """Fail unless a program of Hopper keeps everything in registers, and products of 16 bits on its matrix unit."""
    found = artefact(launches(**shape)[program])
    assert found.spills == 0
    assert found.registers <= REGISTERS
    assert found.shared <= SHARED_MEMORY
    if shape.get("dtype") != torch.float32:
        # Tiles of 32 keys, the most that gradients of size 256, or with dropout, leave room for, are too few for a warp
        # group.
        few = program == "to_keys" and (shape["size"] > 128 or "dropout" in shape)
        assert found.count("HGMMA") > 0 or (few and found.count("HMMA") > 0)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_hopper_nothing_spills_and_products_run_on_the_matrix_unit(shape, program):
    require_ships(program, SHAPES[shape])


def test_on_hopper_gradients_to_queries_of_listed_blocks_do_not_spill():
    require_ships("to_queries", LISTED)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("size", [64, 128])
def test_on_hopper_tiles_of_bands_are_copied_by_the_chip(size, program):
    found = artefact(launches(size)[program])
    assert found.count("UTMALDG") > 0
    assert found.count("LDGSTS") == 0


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("mask", [Full(), Window(left=512)], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("program", ["to_queries", "to_keys"])
@pytest.mark.parametrize("size", [64, 128])
def test_on_hopper_gradients_of_bands_do_not_spill(size, program, mask):
    require_ships(program, {"size": size, "mask": mask})


@pytest.mark.skipif(not tiles.GLUON, reason="Gluon of another Triton is another one")
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(left=512, right=9)], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("choice", PAIRED)
def test_on_hopper_a_warp_that_fetches_gives_its_registers_to_those_that_compute(monkeypatch, choice, mask):
    monkeypatch.setitem(tiles.DENSE_CHOICES, 128, choice)
    monkeypatch.setattr(dense, "pairs", lambda device: True)
    monkeypatch.setattr(dense, "known", lambda kind, name, device: choice)
    launch = launches(128, mask=mask, distribution=SoftmaxWithSink())["forward"]
    found = artefact(launch)
    assert launch.program.__name__ == "attend_paired"
    assert (found.spills, found.count("LDGSTS")) == (0, 0)
    assert min(found.count("USETMAXREG"), found.count("HGMMA"), found.count("UTMALDG")) > 0
    assert found.shared <= SHARED_MEMORY


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(left=512)], ids=lambda mask: mask.kind)
@pytest.mark.parametrize(
    ("width", "choice"), [(width, choice) for width, choices in CANDIDATES.items() for choice in choices]
)
def test_on_hopper_no_candidate_of_the_tuner_spills(monkeypatch, width, choice, mask):
    monkeypatch.setattr(dense, "pairs", lambda device: True)
    monkeypatch.setattr(dense, "known", lambda kind, name, device: choice)
    found = artefact(launches(width, mask=mask)["forward"])
    assert found.spills == 0
    assert found.shared <= SHARED_MEMORY
    assert min(found.count("HGMMA"), found.count("UTMALDG")) > 0


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WIDER)
def test_on_hopper_wide_heads_and_windows_do_not_spill_either(name):
    shape, program = WIDER[name]
    require_ships(program, shape)


@pytest.mark.slow
@pytest.mark.sweep(2)
def test_programs_of_one_head_whose_numbers_are_constants_compile():
    assert {compiled(launch, HOPPER).metadata.target for launch in launches(64, heads=(1, 1)).values()} == {HOPPER}


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
def test_every_program_compiles_for_other_gpus(target, copier):
    copier(present=target == "sm_100")
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in launches(64).values()]
    assert found == [OTHERS[target]] * 4


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("name", FURTHER)
def test_packed_texts_biases_and_dropout_compile_for_other_gpus(name, target):
    asked = launches(**{**FURTHER[name], "size": 64}).values()
    assert {compiled(launch, OTHERS[target]).metadata.target for launch in asked} == {OTHERS[target]}


def test_memory_that_is_loaded_ahead_is_loaded_without_registers(copier):
    copier(present=False)
    assert artefact(launches(64)["forward"]).count("LDGSTS") > 0


def test_what_was_compiled_is_for_hopper():
    assert ".target sm_90a" in compiled(launches(64)["delta"], HOPPER).asm["ptx"]
