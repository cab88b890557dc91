"""Are our kernels right on this GPU, and how fast are they beside others, in the same process?

    benchmarks/gpu/run.sh

Ratios are times of others divided by ours: above 1 we are faster. Shares are of the speed at which memory is copied.
A table of which some kernel is wrong is left out: times of wrong results mean nothing.
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

import bars
import chip
import timing
from parts import Part, apart, at_once
from report import RESULTS, write_report

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 530
"""Seconds for everything."""

JUDGING = 170
"""Seconds that verdicts may take, in most of which programs are compiled; those of tables are so meanwhile."""

INTERPRETED = 20
"""By how many times more everything may take where it is interpreted."""


class Table(NamedTuple):
    """A part that measures, the verdicts on what it measures, and the part that has its programs compiled.

    That is the same one unless it is named, and "" where nothing need be compiled.
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
    Table(Part("eight_bits", "tables", 30), ("eight_bits.verdicts",)),
    Table(Part("sparse", "tables", 100), ("family.bands", "family.varlen", "family.listed")),
    Table(Part("rowwise", "tables", 40), ("rowwise.verdicts",)),
    Table(Part("packed_weights", "tables", 40), ("packed_weights.verdicts",)),
    Table(Part("attention", "features", 25), ("family.learned",)),
    Table(Part("recurrent_steps", "tables", 30), ("recurrent_steps.verdicts",)),
    Table(Part("rowwise", "compiled", 60), ("rowwise.verdicts",)),
)
"""What bars are about first: what there is no time for is what comes last."""

ALONE = (
    Table(Part("sanitizer", "rows", 300), (), ""),
    Table(Part("engine_gpu", "tables", 240), (), ""),
    Table(Part("prompt_steps", "tables", 240), (), ""),
    Table(Part("train_gpu", "tables", 120), (), ""),
)
"""What is measured only where it is asked for by name: each takes a call of its own."""

ASKED = [*(name for table in TABLES for name in table.verdicts), "layers.verdicts"]
VERDICTS = [Part(*name.split("."), JUDGING) for name in dict.fromkeys(ASKED)]


def rows(options: list[str], device: str, tables: list[Table], *, judged: bool) -> Iterator[dict[str, Any]]:
    """Verdicts of all kernels, at once where there is a GPU; times of those that are right, one by one; the bars.

    Unless `judged`, times alone, whatever is right.
    """
    found: list[dict[str, Any]] = []
    for row in judged_and_measured(tables, options, device) if judged else measured(tables, options, device):
        found.append(row)
        yield row
    yield from bars.verdicts(found)


def unmeasured(tables: list[Table], why: str) -> Iterator[dict[str, Any]]:
    """What is said of each table, and of the bars, where nothing can be measured."""
    found = [{"part": table.part.name, "stopped": f"not measured: {why}{unknown(table.part)}"} for table in tables]
    yield from found
    yield from bars.verdicts(found)


def unknown(part: Part) -> str:
    """What else is in the way of a part: that its module cannot be imported, or lacks the function."""
    try:
        getattr(importlib.import_module(part.module), part.function)
    except (ImportError, AttributeError) as error:
        return f"; nor can it be imported: {error}"
    return ""


def measured(tables: list[Table], options: list[str], device: str) -> Iterator[dict[str, Any]]:
    """The rows of some tables."""
    for table in tables:
        yield from apart(table.part, options, (1 if device == "cuda" else INTERPRETED) * table.part.limit)
        yield {"part": table.part.name, "clocks": chip.asked() if device == "cuda" else {}}


def judged_and_measured(tables: list[Table], options: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Verdicts, then times."""
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
    """The parts by which programs of tables are compiled."""
    names = (table.part.name if table.prepared is None else table.prepared for table in tables)
    return [Part(*name.split("."), JUDGING) for name in names if name]


def repair_interpreter() -> None:
    """Have Triton's interpreter round and multiply as its tests do."""
    sys.path.insert(0, str(ROOT / "packages" / "attn-kernels-triton" / "tests" / "interpreted"))
    importlib.import_module("repairs").install()


def alone(options: argparse.Namespace) -> None:
    """One part, in this process."""
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
    """Measure and write; 1 where something is wrong or was not finished."""
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
    name = "interpreted" if options.device == "cpu" else "h200"
    day = "-".join([name, *options.tables, f"{datetime.now(UTC):%Y-%m-%d}"])
    out = options.out or Path(os.environ.get("OUT") or RESULTS) / f"{day}.json"
    asked = [table for table in TABLES if table.part.module not in options.without]
    if options.tables:
        asked = [table for table in (*TABLES, *ALONE) if table.part.module in options.tables]
    given = ["--device", options.device, *(["--small"] if options.small else [])]
    found: list[dict[str, Any]] = []
    facts = {"question": __doc__, **chip.facts(options.device)}
    measuring = rows(given, options.device, asked, judged=not options.tables)
    if (why := facts.get("lacks")) is not None:
        measuring = unmeasured(asked, why)
    write_report(name, facts, kept(measuring, found), out)
    print(bars.table(found))
    return int(any("stopped" in row or row.get("right") is False or row.get("errors") for row in found))


def kept(given: Iterable[dict[str, Any]], found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, kept in a list too."""
    for row in given:
        found.append(row)
        yield row


if __name__ == "__main__":
    raise SystemExit(main())
