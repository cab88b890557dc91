"""These tests run in a process of their own, in which Triton interprets every program: see `test_interpreter.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import repairs
    import torch
    from attn_kernels_triton.attention import tiles
    from attn_kernels_triton.launch import Launch

    repairs.install()
    # Small tiles, so that a small problem has several: an interpreter's time goes by tiles, whatever is in them.
    tiles.CHOICES.update(dict.fromkeys(tiles.CHOICES, tiles.Choice(32, 32, 4, 1)))
    tiles.DENSE_CHOICES.update(dict.fromkeys(tiles.DENSE_CHOICES, tiles.Choice(32, 32, 4, 1, "descriptors")))

    @pytest.fixture(autouse=True)
    def poisoned(monkeypatch):
        """Memory that a kernel was given to write is full of NaN until it does."""
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))

    def filled(allocate):
        """An allocation that fills floating-point memory with NaN."""

        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocated

    @pytest.fixture
    def few_processors(monkeypatch):
        """An interpreter's time goes by programs, and there are as many as processors are to be kept busy."""
        monkeypatch.setattr("attn_kernels_triton.paged.step.processors", lambda _: 6)

    @pytest.fixture
    def programs(monkeypatch):
        """The names of the programs that were started."""
        seen: list[str] = []
        run = Launch.run

        def recorded(self, device):
            seen.append(self.program.__name__)
            run(self, device)

        monkeypatch.setattr(Launch, "run", recorded)
        return seen
