from __future__ import annotations

import pytest
import torch
from artefacts import OTHERS, SHARED_MEMORY, artefact, compiled
from attn_core import Causal, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.modifiers import Alibi, SoftCap, T5Bias
from attn_kernels_triton.attention.tiles import COMPILER
from attn_kernels_triton.kernels.paged import attend_paged, merge_paged
from attn_kernels_triton.paged import attend, cascade
from attn_kernels_triton.paged.tiles import PagedChoice
from paged_launches import decode_launches, paged_launches, step_launches

REGISTERS = 255
EVERYTHING = {"mask": Window(left=100), "modifiers": (SoftCap(cap=30.0), Alibi()), "distribution": SoftmaxWithSink()}
BIASED = {**EVERYTHING, "modifiers": (SoftCap(cap=30.0), T5Bias())}
CODED = [(size, form) for size in (64, 128) for form in ("int8", "int4")]

SHIPPED = {
    "128": {"size": 128},
    "128, biases of distances": {"size": 128, "modifiers": (T5Bias(),)},
    "latents of 128 heads": {"size": 512, "form": "latent", "heads": (128, 1)},
}
OTHER_SHIPPED = {
    "64": {"size": 64},
    "256": {"size": 256},
    "128, int8": {"size": 128, "form": "int8"},
    "128, int4": {"size": 128, "form": "int4"},
    "256, int8": {"size": 256, "form": "int8"},
    "256, int4": {"size": 256, "form": "int4"},
    "128, everything else": {"size": 128, **EVERYTHING},
    "128, a tree": {"size": 128, "tree": True},
    "128, a tree and everything else": {"size": 128, "tree": True, **EVERYTHING},
    "128, a tree, int4": {"size": 128, "tree": True, "form": "int4"},
    "128, biases of distances and everything else": {"size": 128, **BIASED},
    "128, biases of distances, a tree and everything else": {"size": 128, "tree": True, **BIASED},
    **{f"{size}, biases of distances, {form}": {"size": size, "form": form, **BIASED} for size, form in CODED},
    "64, biases of distances": {"size": 64, **BIASED},
    **{f"{size}, biases of distances, float32": {"size": size, "dtype": torch.float32, **BIASED} for size in (64, 128)},
    **{
        f"{size}, a tree of many rows, {form}": {"size": size, "tree": True, "form": form, "heads": (64, 2)}
        for size in (64, 128, 256)
        for form in ("plain", "int8", "int4")
    },
    "128, a tree of many rows and everything else": {"size": 128, "tree": True, "heads": (64, 2), **EVERYTHING},
    **{f"256, everything, {form}": {"size": 256, "form": form, **EVERYTHING} for form in ("plain", "int8", "int4")},
    "latents of 16 heads": {"size": 512, "form": "latent", "heads": (16, 1)},
    **{f"{size}, float32": {"size": size, "dtype": torch.float32} for size in (64, 128, 256)},
    "latents, float32": {"size": 512, "form": "latent", "heads": (16, 1), "dtype": torch.float32},
}


SPILLS = {("attend_paged", 64, 512): 48}
"""Instructions that spill, by program, rows and width: none but where an H200 was faster with them."""


def require_ships(shape: dict) -> None:
    """Fail unless every program of a step keeps everything in registers and within shared memory."""
    for launch in paged_launches(**shape):
        found = artefact(launch)
        what = launch.program.__name__, launch.call.tile.rows.value
        assert found.spills <= SPILLS.get((*what, launch.call.tile.value_width.value), 0), (what, found.spills)
        assert found.registers <= REGISTERS, what
        assert found.shared <= SHARED_MEMORY, what
        if shape.get("dtype") != torch.float32 and what[0] == "attend_paged":
            assert found.count("HGMMA" if what[1] >= 64 else "HMMA") > 0, what
            assert found.count("LDGSTS") > 0 or "int" in shape.get("form", ""), what


@pytest.mark.parametrize("name", SHIPPED)
def test_on_hopper_programs_over_pages_do_not_spill(name):
    require_ships(SHIPPED[name])


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OTHER_SHIPPED)
def test_on_hopper_no_other_program_over_pages_spills_either(name):
    if COMPILER == (3, 7) and name == "128, biases of distances, float32":
        pytest.xfail("Triton 3.7 spills here")
    require_ships(OTHER_SHIPPED[name])


BUCKETS = {
    "128": {"size": 128},
    "128, int8": {"size": 128, "form": "int8"},
    "latents of 16 heads": {"size": 512, "form": "latent", "heads": (16, 1)},
    "latents of 128 heads": {"size": 512, "form": "latent", "heads": (128, 1)},
}


@pytest.mark.parametrize("name", BUCKETS)
def test_on_hopper_steps_that_are_cut_on_the_device_do_not_spill(name):
    launches = decode_launches(**BUCKETS[name])
    schedule, attend, merge = map(artefact, launches)
    tile = launches[1].call.tile
    allowed = SPILLS.get(("attend_paged", tile.rows.value, tile.value_width.value), 0)
    assert (schedule.spills, merge.spills, max(attend.spills, allowed)) == (0, 0, allowed)
    assert max(found.shared for found in (schedule, attend, merge)) <= SHARED_MEMORY
    assert attend.count("HGMMA") + attend.count("HMMA") > 0


MIXED = {
    "128": {"size": 128},
    "64, a window": {"size": 64, "mask": Window(left=500)},
    "128, int8": {"size": 128, "form": "int8"},
    "256": {"size": 256, "heads": (8, 4)},
}
"""Steps with prompts, of 257 requests with the padding."""


@pytest.mark.parametrize("name", MIXED)
def test_on_hopper_steps_with_prompts_that_are_cut_on_the_device_do_not_spill(name):
    found = list(map(artefact, step_launches(**MIXED[name])))
    assert [one.spills for one in found] == [0, 0, 0]
    assert max(one.shared for one in found) <= SHARED_MEMORY
    assert found[1].count("HGMMA") > 0


@pytest.fixture
def sharing(monkeypatch):
    """Three requests decode that begin with the same 640 rows, which they meet together however little that saves."""
    monkeypatch.setattr(cascade, "WORTH", 1)
    monkeypatch.setattr("paged_launches.CONTEXTS", (700, 650, 700))
    return {"lengths": (1, 1, 1)}


SHARING = {
    "few rows": {"size": 128},
    "many rows": {"size": 128, "heads": (32, 2)},
    **{f"many rows of {size}, {form}": {"size": size, "heads": (32, 2), "form": form} for size, form in CODED},
    "many rows of 256": {"size": 256, "heads": (32, 2)},
    "many rows and everything": {"size": 128, "heads": (32, 2), **EVERYTHING, "mask": Causal()},
    "float32": {"size": 64, "dtype": torch.float32},
}


@pytest.mark.parametrize("name", SHARING)
def test_on_hopper_programs_over_shared_prefixes_do_not_spill(name, sharing):
    shape = {**SHARING[name], **sharing}
    own, together, merge = paged_launches(**shape)
    assert (together.program, merge.program) == (attend_paged, merge_paged)
    assert together.call.slots_of is not None
    assert together.call.sums is own.call.sums
    require_ships(shape)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
def test_programs_over_shared_prefixes_compile_for_other_gpus(target, sharing):
    found = [
        compiled(launch, OTHERS[target]).metadata.target for launch in paged_launches(64, heads=(32, 2), **sharing)
    ]
    assert found == [OTHERS[target]] * 3


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
def test_steps_that_are_cut_on_the_device_compile_for_other_gpus(target):
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in decode_launches(128)]
    assert found == [OTHERS[target]] * 3


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
def test_steps_with_prompts_that_are_cut_on_the_device_compile_for_other_gpus(target):
    launches, chip = step_launches(128), OTHERS[target]
    assert [compiled(launch, chip).metadata.target for launch in launches] == [chip] * 3
    if chip.backend == "cuda":
        # Tiles of heads of 128 spill a little on sm_80, in steps that are made anew as well.
        assert [artefact(launch, chip).spills for launch in step_launches(64)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("form", ["plain", "int8", "int4"])
def test_programs_over_pages_compile_for_other_gpus(target, form):
    found = [compiled(launch, OTHERS[target]).metadata.target for launch in paged_launches(64, form=form)]
    # Tiles of few rows with what merges them, and of many.
    assert found == [OTHERS[target]] * 3


@pytest.mark.parametrize(("modifiers", "keys"), [((), 16), ((T5Bias(),), 64)])
def test_what_was_measured_without_biases_is_not_taken_beside_them(monkeypatch, modifiers, keys):
    monkeypatch.setattr(attend, "measured_paged", lambda query, form, sizes: PagedChoice(16, 4, 1))
    few = [launch.call.tile for launch in paged_launches(128, modifiers=modifiers) if launch.program is attend_paged]
    assert {tile.rows.value: tile.keys.value for tile in few}[16] == keys
