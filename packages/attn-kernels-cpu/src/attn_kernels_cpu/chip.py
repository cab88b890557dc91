"""What the processor can do."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "f16c")
"""Instruction sets that the kernels use, as Linux calls them."""
TILES = ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16")
"""Those of products of whole tiles of bfloat16, which are used where they are."""


@cache
def flags(info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of the processor, as Linux calls them; empty where it does not say."""
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def lacking(present: frozenset[str], machine: str = platform.machine()) -> str | None:
    """Why the kernels cannot run on a chip with these instruction sets, or None if they can."""
    if machine not in ("x86_64", "AMD64"):
        return f"they are written for x86_64, this is {machine}"
    return without(NEEDED, present)


def without(needed: Sequence[str], present: frozenset[str]) -> str | None:
    """Which of the instruction sets the processor has not, in a sentence; None if it has them all."""
    missing = [name for name in needed if name not in present]
    return f"the processor has no {', '.join(missing)}" if missing else None
