"""Conditions that the kernels of this package have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_kernels_triton.machine import interpreted


@dataclass(frozen=True)
class OnGpu:
    """A GPU; where Triton interprets programs, the CPU too."""

    def refuses(self, value: Any) -> str | None:
        """Why the device is refused, or None if it is accepted."""
        if value == "cuda" or (value == "cpu" and interpreted()):
            return None
        return f"{value!r} is not of 'cuda'"


@dataclass(frozen=True)
class InOrder:
    """A tuple with each of these words at most once, in this order."""

    words: tuple[str, ...]

    def refuses(self, value: Any) -> str | None:
        """Why the tuple is refused, or None if it is accepted."""
        places = [self.words.index(word) if word in self.words else -1 for word in value]
        if -1 not in places and places == sorted(set(places)):
            return None
        return f"{value!r} is not some of {', '.join(self.words)}, each once and in this order"
