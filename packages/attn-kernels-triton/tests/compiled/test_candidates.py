"""What the tuner measures beside forward passes: nothing of it spills."""

from __future__ import annotations

import pytest
from artefacts import SHARED_MEMORY, artefact
from attn_core import Causal, Full, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.modifiers import SoftCap
from attn_kernels_triton.attention import forward as dense
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.paged import tiles as choices
from attn_kernels_triton.paged.tiles import SMALL_TILE
from attn_kernels_triton.recurrence import tiles as scan_tiles
from attn_kernels_triton.tuning.candidates import BACKWARD, PAGED, RECURRENCES
from launches import launches
from paged_launches import paged_launches
from scan_launches import scan_launches

MORE = {"modifiers": (SoftCap(cap=30.0),), "distribution": SoftmaxWithSink()}


def require_ships(launch) -> None:
    """Fail unless a program keeps everything in registers and shared memory, and products on the matrix unit."""
    found = artefact(launch)
    assert found.spills == 0
    assert found.shared <= SHARED_MEMORY
    assert found.count("HGMMA") + found.count("HMMA") > 0


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("heads", [(64, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(left=512)], ids=lambda mask: mask.kind)
@pytest.mark.parametrize(("width", "both"), [(width, both) for width, all_ in BACKWARD.items() for both in all_])
def test_on_hopper_no_candidate_of_a_backward_pass_spills(monkeypatch, width, both, mask, heads):
    monkeypatch.setattr(dense, "has_copier", lambda device: True)
    for shipped in (tiles.DENSE_BACKWARD, tiles.DENSE_BACKWARD_BOUNDED):
        monkeypatch.setitem(shipped, width, both)
    found = launches(width, mask=mask, heads=heads)
    require_ships(found["to_queries"])
    require_ships(found["to_keys"])


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("parts", [{}, MORE], ids=["plain", "more"])
@pytest.mark.parametrize(("width", "choice"), [(width, choice) for width, all_ in PAGED.items() for choice in all_])
def test_on_hopper_no_candidate_of_decoding_spills(monkeypatch, width, choice, parts):
    monkeypatch.setattr("attn_kernels_triton.paged.attend.interpreted", lambda: True)
    monkeypatch.setitem(choices.PAGED_CHOICES, (SMALL_TILE, True, width), choice)
    form = {"form": "latent", "heads": (16, 1)} if width == choices.WIDE else {}
    attend, *_ = paged_launches(width, lengths=(1, 1, 1), **form, **parts)
    require_ships(attend)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("program", "channels", "choice"), [(*kind, choice) for kind, all_ in RECURRENCES.items() for choice in all_]
)
def test_on_hopper_no_candidate_of_a_recurrence_spills(monkeypatch, program, channels, choice):
    monkeypatch.setattr("attn_kernels_triton.recurrence.compute.interpreted", lambda: True)
    monkeypatch.setitem(scan_tiles.SCAN_CHOICES, (program, True, channels, scan_tiles.NARROWEST), choice)
    require_ships(scan_launches("channel" if channels else "head", delta_rule=True)[program])
