"""What a benchmark's result says beside its rows: question, command, commit, the machine and its load."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, number of cores and present load."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def write_report(name: str, facts: dict[str, Any], rows: Iterable[dict[str, Any]], out: Path | None) -> None:
    """Print each row as it comes and write all to `out`, by default a new file of that name in `RESULTS`."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=False)
    now = datetime.now(UTC)
    said = {
        "command": ["python", *sys.argv],
        "commit": commit.stdout.strip(),
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
    }
    result: dict[str, Any] = {**facts, **said, "rows": []}
    for row in rows:
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
    result["load_after"] = os.getloadavg()[0]
    path = out or RESULTS / f"{name}-{now:%Y%m%dT%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
