"""Rehearses the whole GPU benchmark in Triton's interpreter, and fails on whatever would fail on a GPU machine.

    nox -s gpu-kit
    python benchmarks/gpu/rehearse.py

Run it with the interpreter and the libraries of that machine, but for the build of torch: PYTHON names it. A part
fails that stops, gives a wrong result, or refuses something that is attn's own; so does a bar that no row can meet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bars
import everything

RUN = Path(__file__).with_name("run.sh")
ALONE = [table.part.module for table in everything.ALONE if table.part.module != "sanitizer"]
"""The parts that take a run of their own; compute-sanitizer needs a GPU."""
OF_CUDA = ("beside_fla", "rowwise.compiled", "growth")
"""Parts that measure nothing on a CPU: their rows say so."""


def rehearsed(tables: list[str], folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, all tables if none is named."""
    out = folder / f"{'-'.join(tables) or 'all'}.json"
    command = ["bash", str(RUN), "--small", "--out", str(out), *(["--tables", *tables] if tables else [])]
    environment = {"PYTHON": sys.executable, **os.environ, "DEVICE": "cpu"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []
    return found or [{"part": out.stem, "stopped": "wrote no rows"}]


def unreachable(rows: list[dict[str, Any]]) -> list[str]:
    """The bars whose value no row of their parts has, although the parts ran."""
    found = []
    for bar in bars.BARS:
        parts = [part for part in bar.parts if not part.startswith(OF_CUDA)]
        ran = [row for row in rows if row.get("part") in parts]
        refused = any("refused" in row for row in ran)  # by a peer, which needs a GPU
        if ran and not refused and not any(isinstance(row.get(bar.key), int | float) for row in ran):
            found.append(f"{bar.what}: no row of {', '.join(parts)} has {bar.key!r}")
    return found


def main() -> int:
    """Run everything and print what fails; returns 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=[], metavar="MODULE", help="these tables alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = [given.tables] if given.tables else [[], *([one] for one in ALONE)]
        rows = [row for tables in runs for row in rehearsed(tables, Path(name))]
    wrong = [f"{row.get('part')}: {row}" for row in rows if "bar" not in row and bars.fails(row)] + unreachable(rows)
    print(*wrong, sep="\n")
    print(f"{len(wrong)} failures in {len(rows)} rows")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
