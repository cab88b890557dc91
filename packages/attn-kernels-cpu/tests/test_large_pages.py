"""Memory for weights: parts of large pieces that nobody else has."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch
from attn_kernels_cpu import pages
from attn_kernels_cpu.pages import LINE, PIECE, LargePages


def test_parts_are_zero_lie_apart_and_begin_with_a_cache_line():
    """Small ones side by side, one that fills the rest, one that does not fit, and one larger than a piece."""
    room = LargePages()
    sizes = [1, 64, 100, PIECE // 2, PIECE // 2, PIECE + 1, 7]
    parts = [room.room(size) for size in sizes]
    for number, part in enumerate(parts, 1):
        assert part.data_ptr() % LINE == 0
        assert not part[::4096].any()
        part[::4096], part[-1] = number, number
    assert [len(part) for part in parts] == sizes
    for number, part in enumerate(parts, 1):
        assert (part[::4096] == number).all()
        assert part[-1] == number


def test_a_piece_is_given_back_with_the_last_of_its_parts(monkeypatch):
    """The room keeps none but the piece that it is handing out."""
    held = []

    class Watched(mmap.mmap):
        def __new__(cls, *arguments, **named):
            memory = super().__new__(cls, *arguments, **named)
            held.append(weakref.ref(memory))
            return memory

    monkeypatch.setattr(pages.mmap, "mmap", Watched)
    room = LargePages()
    first, second, third = room.room(PIECE // 2), room.room(PIECE // 2), room.room(PIECE)
    assert len(held) == 2
    del first, third
    gc.collect()
    assert held[0]() is not None
    del second
    gc.collect()
    assert held[0]() is None


@pytest.mark.parametrize("refused", [True, False])
def test_a_system_without_large_pages_gives_small_ones(monkeypatch, refused):
    """Whether it refuses them or has never heard of them."""

    class Small(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", Small)
    if not refused:
        monkeypatch.delattr(pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(LargePages().room(10), torch.zeros(10, dtype=torch.uint8))
