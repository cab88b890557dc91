"""Writing of benchmark reports: rows with the question, command, commit, machine and load."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor's name, the number of cores and the current load."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def commit() -> str:
    """The short commit hash of this tree; empty without git or a repository."""
    if shutil.which("git") is None:
        return ""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def write_report(name: str, facts: dict[str, Any], rows: Iterable[dict[str, Any]], out: Path | None) -> None:
    """Print each row as it is measured and write all to `out`, by default a new file `name`-TIME.json in `RESULTS`.

    The file is rewritten with every row, before the row is printed, so that a run that ends early loses none.
    """
    now = datetime.now(UTC)
    said = {
        "command": ["python", *sys.argv],
        "commit": commit(),
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
    }
    result: dict[str, Any] = {**facts, **said, "rows": []}
    path = out or RESULTS / f"{name}-{now:%Y%m%dT%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        result["rows"].append(row)
        replace(path, result)
        print(json.dumps(row), flush=True)
    replace(path, {**result, "load_after": os.getloadavg()[0]})
    print(f"written to {path}")


def replace(path: Path, result: dict[str, Any]) -> None:
    """Replace the file by the new result, atomically."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(path)
