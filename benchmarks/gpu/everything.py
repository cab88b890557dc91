"""Are our kernels right on this GPU, and how fast are they beside others, in the same process?

    benchmarks/gpu/run.sh

Ratios are times of others divided by ours: above 1 we are faster. Shares are of the speed at which memory is copied.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention
import correctness
import decoding
import recurrences
import rowwise
import torch
import triton
from cases import RIGHT, SMALL
from report import RESULTS, write_report


def rows(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts of all kernels; if all are right, times."""
    wrong = 0
    for verdict in verdicts(device, small=small):
        wrong += not verdict["right"]
        yield verdict
    if wrong:
        yield {"stopped": f"{wrong} results are wrong; times of wrong results mean nothing"}
        return
    for part in (attention, decoding, recurrences, rowwise):
        yield from part.tables(device, small=small)


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """What is right, of all kernels."""
    yield from correctness.verdicts(SMALL if small else RIGHT, device)
    yield from decoding.verdicts(device, small=small)
    yield from recurrences.verdicts(device, small=small)
    yield from rowwise.verdicts(device, small=small)


def facts(device: str) -> dict[str, Any]:
    """Device, versions and clocks."""
    found = {"question": __doc__, "torch": torch.__version__, "triton": triton.__version__, "device": device}
    if device != "cuda":
        return found
    properties = torch.cuda.get_device_properties(0)
    return {**found, "device": properties.name, "bytes": properties.total_memory, "clock_mhz": torch.cuda.clock_rate()}


def main() -> int:
    """Measure and write; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    name = "interpreted" if options.device == "cpu" else "h200"
    out = options.out or RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    found: list[dict[str, Any]] = []

    def kept() -> Iterator[dict[str, Any]]:
        for row in rows(options.device, small=options.small):
            found.append(row)
            yield row

    write_report(name, facts(options.device), kept(), out)
    return int(any("stopped" in row for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
