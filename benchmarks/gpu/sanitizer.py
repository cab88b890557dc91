"""NVIDIA's compute-sanitizer over every kernel once, at small sizes: no read and no write out of bounds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parts import WHOLE

TOOL = "compute-sanitizer"
PARTS = (
    "family.bands",
    "family.bands_of_128",
    "family.bands_of_sizes",
    "family.varlen",
    "family.listed",
    "family.learned",
    "schedules.verdicts",
    "schedules.gradients",
    "eight_bits.verdicts",
    "decoding.verdicts",
    "recurrences.constant",
    "recurrences.by_head",
    "recurrences.by_channel",
    "rowwise.verdicts",
)
SECONDS = 80


def rows(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- sizes are small anyway
    """For each part the errors that the tool found, or why it was not asked; all at once, for nothing is timed."""
    if device != "cuda" or shutil.which(TOOL) is None:
        yield {"case": TOOL, "errors": None, "why": "no GPU" if device != "cuda" else "the tool is not here"}
        return
    with ThreadPoolExecutor(len(PARTS)) as pool:
        yield from pool.map(checked, PARTS)


def checked(part: str) -> dict[str, Any]:
    """What the tool says of a part."""
    command = [TOOL, "--tool", "memcheck", sys.executable, str(WHOLE), "--part", part, "--small"]
    found: dict[str, Any] = {"case": part, "errors": None}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {**found, "why": f"did not end within {SECONDS} s"}
    said = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
    if said is None:
        return {**found, "why": f"the tool did not work: {done.stdout[-300:]}{done.stderr[-300:]}"}
    errors = int(said[1])
    return {**found, "errors": errors, **({"wrong": done.stdout[-2000:]} if errors else {})}
