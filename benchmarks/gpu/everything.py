"""Are attn's kernels right on this GPU, and how fast are they compared with others, in the same process?

    benchmarks/gpu/run.sh

Ratios are times of others divided by attn's: above 1 attn is faster. Shares are fractions of the memory copy bandwidth.
Tables for which a kernel gives wrong results are left out, as their times are meaningless.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "out" / "gpu-kit"))  # after what is installed

import bars
import chip
import timing
from parts import Part, apart, at_once
from report import RESULTS, write_report

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 530
"""The time limit for the whole run, in seconds."""

JUDGING = 170
"""The time limit for the verdicts, in seconds, mostly for compiling; the tables' programs are compiled meanwhile."""

INTERPRETED = 20
"""The factor by which time limits are extended in Triton's interpreter."""


class Table(NamedTuple):
    """A part that measures times, the verdicts on the kernels it measures, and the part that compiles its programs.

    That last part is the measuring part itself unless it is named, and "" if nothing needs to be compiled.
    """

    part: Part
    verdicts: tuple[str, ...]
    prepared: str | None = None


BANDS = ("family.bands", "family.bands_of_128", "family.bands_of_sizes")
SCHEDULES = ("schedules.verdicts", "schedules.gradients")
RECURRENCES = ("recurrences.constant", "recurrences.by_head", "recurrences.by_channel")
TABLES = (
    Table(Part("chip", "tables", 30), (), ""),
    Table(Part("schedules", "tables", 50), (*BANDS, *SCHEDULES), "schedules.prepare"),
    Table(Part("attention", "tables", 70), BANDS),
    Table(Part("decoding", "tables", 60), ("decoding.verdicts",)),
    Table(Part("sparse", "kept", 40), (*BANDS, "family.listed")),
    Table(Part("texts", "tables", 30), (*BANDS, "family.varlen")),
    Table(Part("training_step", "tables", 40), BANDS),
    Table(Part("growth", "tables", 25), BANDS),
    Table(Part("recurrences", "tables", 40), RECURRENCES),
    Table(Part("beside_fla", "constant", 40), ("recurrences.constant",)),
    Table(Part("beside_fla", "by_head", 40), ("recurrences.by_head",)),
    Table(Part("beside_fla", "by_channel", 40), ("recurrences.by_channel",)),
    Table(Part("sparse", "tables", 100), ("family.bands", "family.varlen", "family.listed")),
    Table(Part("rowwise", "tables", 40), ("rowwise.verdicts",)),
    Table(Part("packed_weights", "tables", 40), ("packed_weights.verdicts",)),
    Table(Part("attention", "features", 25), ("family.learned",)),
    Table(Part("recurrent_steps", "tables", 30), ("recurrent_steps.verdicts",)),
    Table(Part("rowwise", "compiled", 60), ("rowwise.verdicts",)),
)
"""The tables in order of priority, those with performance targets first; the last ones are dropped if time runs out."""

ALONE = (
    Table(Part("sanitizer", "rows", 300), (), ""),
    Table(Part("engine_gpu", "tables", 240), (), ""),
    Table(Part("prompt_steps", "tables", 240), (), ""),
    Table(Part("train_gpu", "tables", 120), (), ""),
)
"""The tables that are only measured if named with --tables; each takes a run of its own."""

ASKED = ["recorded.verdicts", *(name for table in TABLES for name in table.verdicts), "layers.verdicts"]
VERDICTS = [Part(*name.split("."), JUDGING) for name in dict.fromkeys(ASKED)]


def rows(options: list[str], device: str, tables: list[Table], *, judged: bool) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on all kernels (concurrently on a GPU), the times of those that are right, and the targets.

    Unless `judged`, only times are measured, without verdicts.
    """
    found: list[dict[str, Any]] = []
    for row in judged_and_measured(tables, options, device) if judged else measured(tables, options, device):
        found.append(row)
        yield row
    yield from bars.verdicts(found)


def unmeasured(tables: list[Table], why: str) -> Iterator[dict[str, Any]]:
    """The rows for all tables and targets if nothing can be measured."""
    found = [{"part": table.part.name, "stopped": f"not measured: {why}{unknown(table.part)}"} for table in tables]
    yield from found
    yield from bars.verdicts(found)


def unknown(part: Part) -> str:
    """A further problem of a part: its module cannot be imported, or lacks the function; empty if there is none."""
    try:
        getattr(importlib.import_module(part.module), part.function)
    except (ImportError, AttributeError) as error:
        return f"; nor can it be imported: {error}"
    return ""


def measured(tables: list[Table], options: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Measure some tables one after the other and yield their rows."""
    for table in tables:
        yield from apart(table.part, options, (1 if device == "cuda" else INTERPRETED) * table.part.limit)
        yield {"part": table.part.name, "clocks": chip.asked() if device == "cuda" else {}}


def judged_and_measured(tables: list[Table], options: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Yield the verdicts, then the times of the tables without wrong results, as far as the time limit allows."""
    slack = 1 if device == "cuda" else INTERPRETED
    ends = time.monotonic() + slack * BUDGET
    wrong = set()
    for row in at_once(VERDICTS, prepared(tables) if device == "cuda" else [], options, slack):
        yield row
        if row.get("right") is False or row.get("failed"):
            wrong.add(row["part"])
    for table in tables:
        left = ends - time.monotonic()
        if bad := wrong.intersection(table.verdicts):
            yield {"part": table.part.name, "stopped": f"not measured, for {', '.join(sorted(bad))} found it wrong"}
        elif left < 1:
            yield {"part": table.part.name, "stopped": "no time was left"}
        else:
            yield from apart(table.part, options, min(slack * table.part.limit, left))
            yield {"part": table.part.name, "clocks": chip.asked() if device == "cuda" else {}}


def prepared(tables: list[Table]) -> list[Part]:
    """The parts that compile the programs of these tables."""
    names = (table.part.name if table.prepared is None else table.prepared for table in tables)
    return [Part(*name.split("."), JUDGING) for name in names if name]


def repair_interpreter() -> None:
    """Install the same fixes of rounding and multiplication in Triton's interpreter as the kernels' tests."""
    sys.path.insert(0, str(ROOT / "packages" / "attn-kernels-triton" / "tests" / "interpreted"))
    importlib.import_module("repairs").install()


def alone(options: argparse.Namespace) -> None:
    """Run one part in this process and print its rows as JSON lines."""
    if options.device == "cpu":
        repair_interpreter()
    if options.once:
        timing.rehearse()
    try:
        for row in Part(*options.part.split("."), 0).rows(options.device, small=options.small):
            print(json.dumps(row), flush=True)
    except Exception as error:
        said = str(error).strip().partition("\n")[0][:300]
        print(json.dumps({"stopped": f"{type(error).__name__}: {said}", "failed": True}), flush=True)
        raise


def main() -> int:
    """Run the benchmark and write the report; returns 1 if a result is wrong or a part did not finish, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted({table.part.module for table in (*TABLES, *ALONE)})
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--part", help="one part alone, whose rows are printed: as decoding.verdicts")
    parser.add_argument("--tables", nargs="+", default=[], metavar="MODULE", choices=known, help="these tables alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="MODULE", choices=known, help="all but these")
    parser.add_argument("--once", action="store_true", help="call everything once, to have it compiled")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.part:
        alone(options)
        return 0
    facts = {"question": __doc__, **chip.facts(options.device)}
    name = "interpreted" if options.device == "cpu" else chip.short(facts["device"])
    day = "-".join([name, *options.tables, f"{datetime.now(UTC):%Y-%m-%d}"])
    out = options.out or Path(os.environ.get("OUT") or RESULTS) / f"{day}.json"
    asked = [table for table in TABLES if table.part.module not in options.without]
    if options.tables:
        asked = [table for table in (*TABLES, *ALONE) if table.part.module in options.tables]
    given = ["--device", options.device, *(["--small"] if options.small else [])]
    found: list[dict[str, Any]] = []
    measuring = rows(given, options.device, asked, judged=not options.tables)
    if (why := facts.get("lacks")) is not None:
        measuring = unmeasured(asked, why)
    write_report(name, facts, kept(measuring, found), out)
    print(bars.table(found))
    return int(any(bars.fails(row) for row in found))


def kept(given: Iterable[dict[str, Any]], found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows and append each to `found`."""
    for row in given:
        found.append(row)
        yield row


if __name__ == "__main__":
    raise SystemExit(main())
