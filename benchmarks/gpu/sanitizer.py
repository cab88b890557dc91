"""NVIDIA's compute-sanitizer over every kernel once, at small sizes: no read and no write out of bounds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from parts import WHOLE

TOOL = "compute-sanitizer"
PARTS = (
    "family.verdicts.1",
    "schedules.verdicts",
    "eight_bits.verdicts",
    "decoding.verdicts",
    "recurrences.verdicts.1",
    "rowwise.verdicts",
)
TOGETHER = 40
"""Seconds for all of them."""


def rows(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- sizes are small anyway
    """For each part the errors that the tool found, or why it was not asked."""
    if device != "cuda" or shutil.which(TOOL) is None:
        yield {"part": TOOL, "errors": None, "why": "no GPU" if device != "cuda" else "the tool is not here"}
        return
    ends = time.monotonic() + TOGETHER
    for part in PARTS:
        command = [TOOL, "--tool", "memcheck", sys.executable, str(WHOLE), "--part", part, "--small"]
        try:
            left = max(1.0, ends - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            yield {"part": f"{TOOL} {part}", "errors": None, "why": "there was no time for it"}
            continue
        said = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
        errors = int(said[1]) if said else None
        found = {"part": f"{TOOL} {part}", "errors": errors}
        yield {**found, "stopped": done.stdout[-2000:]} if errors else found
