"""Are our kernels right on this GPU, and how fast are they beside others, in the same process?

    benchmarks/gpu/run.sh

Ratios are times of others divided by ours: above 1 we are faster. Shares are of the speed at which memory is copied.
A table whose kernels are not all right is left out: times of wrong results mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from parts import Part, apart, judges
from report import RESULTS, write_report

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 570
"""Seconds for everything."""

INTERPRETED = 20
"""By how many times more everything may take where it is interpreted."""
TABLES = {
    judges("schedules"): [Part("schedules", "tables", 70)],
    judges("family", 4): [
        Part("attention", "tables", 110),
        Part("growth", "tables", 20),
        Part("training_step", "tables", 30),
    ],
    judges("eight_bits"): [Part("eight_bits", "tables", 30)],
    judges("decoding"): [Part("decoding", "tables", 40)],
    judges("recurrences", 4): [Part("recurrences", "tables", 60)],
    judges("rowwise"): [Part("rowwise", "tables", 40)],
}
"""Verdicts, and what is measured where all of them are right."""
MEMORY_CHECK = Part("sanitizer", "rows", 45)


def rows(options: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Verdicts of all kernels, at once where there is a GPU; then one by one times of those that are right."""
    slack = 1 if device == "cuda" else INTERPRETED
    ends = time.monotonic() + slack * BUDGET
    right = {}
    parts = [part for several in TABLES for part in several]
    with ThreadPoolExecutor(len(parts) if device == "cuda" else 1) as pool:
        found = pool.map(lambda part: list(apart(part, options, slack * part.limit)), parts)
        for part, judged in zip(parts, found, strict=True):
            yield from judged
            right[part] = all(row.get("right") for row in judged)
            if not right[part]:
                yield {"part": part.name, "stopped": "not all is right; nothing of it is timed"}
    timed = [table for several, tables in TABLES.items() if all(map(right.get, several)) for table in tables]
    for part in [*timed, MEMORY_CHECK]:
        left = ends - time.monotonic()
        if left < 1:
            yield {"part": part.name, "stopped": "no time was left"}
        else:
            yield from apart(part, options, min(slack * part.limit, left))


def part_of(name: str) -> Part:
    """The part of this name."""
    tables = [part for tables in TABLES.values() for part in tables]
    parts = [*(part for several in TABLES for part in several), *tables, MEMORY_CHECK]
    return next(part for part in parts if part.name == name)


def facts(device: str) -> dict[str, Any]:
    """Device, versions and clocks."""
    found = {"question": __doc__, "torch": torch.__version__, "triton": triton.__version__, "device": device}
    if device != "cuda":
        return found
    properties = torch.cuda.get_device_properties(0)
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    clocks = dict(zip(fields.split(","), said.split(", "), strict=False))
    return {**found, "device": properties.name, "bytes": properties.total_memory, "clocks": clocks}


def repair_interpreter() -> None:
    """Have Triton's interpreter round and multiply as its tests do."""
    sys.path.insert(0, str(ROOT / "packages" / "attn-kernels-triton" / "tests" / "interpreted"))
    importlib.import_module("repairs").install()


def main() -> int:
    """Measure and write; 1 where something is wrong or was not finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--part", help="one part alone, whose rows are printed: as decoding.verdicts")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.part:
        if options.device == "cpu":
            repair_interpreter()
        for row in part_of(options.part).rows(options.device, small=options.small):
            print(json.dumps(row), flush=True)
        return 0
    name = "interpreted" if options.device == "cpu" else "h200"
    out = options.out or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    found: list[dict[str, Any]] = []

    def kept() -> Iterator[dict[str, Any]]:
        given = ["--device", options.device, *(["--small"] if options.small else [])]
        for row in rows(given, options.device):
            found.append(row)
            yield row

    write_report(name, facts(options.device), kept(), out)
    return int(any("stopped" in row for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
