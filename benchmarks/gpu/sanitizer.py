"""Runs NVIDIA's compute-sanitizer on every kernel once, at small sizes: finds out-of-bounds accesses, races in shared
memory, and reads of uninitialised memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from parts import WHOLE

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck", "initcheck")
PARTS = (
    "family.bands",
    "family.bands_of_128",
    "family.bands_of_sizes",
    "family.varlen",
    "family.listed",
    "family.learned",
    "schedules.verdicts",
    "schedules.gradients",
    "decoding.verdicts",
    "recurrences.constant",
    "recurrences.by_head",
    "recurrences.by_channel",
    "rowwise.verdicts",
)
SECONDS = 80


def rows(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- sizes are small anyway
    """For each check and part, the number of errors found, or why it was not run; all parts run concurrently."""
    if device != "cuda" or shutil.which(TOOL) is None:
        yield {"case": TOOL, "errors": None, "why": "no GPU" if device != "cuda" else "the tool is not here"}
        return
    with ThreadPoolExecutor(len(PARTS)) as pool:
        asked = [pool.submit(checked, check, part) for check in CHECKS for part in PARTS]
        for done in as_completed(asked):
            yield done.result()


def checked(check: str, part: str) -> dict[str, Any]:
    """The result of one check of a part."""
    command = [TOOL, "--tool", check, sys.executable, str(WHOLE), "--part", part, "--small"]
    found: dict[str, Any] = {"case": f"{check}, {part}", "errors": None}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {**found, "why": f"did not end within {SECONDS} s"}
    said = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", done.stdout)
    if said is None:
        return {**found, "why": f"the tool did not work: {done.stdout[-300:]}{done.stderr[-300:]}"}
    errors = int(said[1])
    return {**found, "errors": errors, **({"wrong": done.stdout[-2000:]} if errors else {})}
