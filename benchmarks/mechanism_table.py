"""Writes the tables of docs/mechanism-speed.md, from results of `mechanisms_cpu.py` and `recurrences_cpu.py`.

    python benchmarks/mechanism_table.py benchmarks/results/mechanisms-cpu*.json benchmarks/results/recurrences-cpu.json

replaces the text between the two markers of the page with one table of mechanisms, which joins the files, one of decode
steps, and one of recurrences. For cases that several files contain, the last file is used.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "mechanism-speed.md"
BEGIN, END = "<!-- tables of the benchmarks -->", "<!-- end of the tables -->"
MEGABYTE = 1 << 20


def times(low: float, middle: float, high: float) -> str:
    """A median and its range, in milliseconds, as text."""
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def of_mechanisms(rows: Iterable[dict[str, Any]]) -> list[str]:
    """One row for each mechanism and length: attn's, dense attention and another package's layer."""
    lines = [
        "| mechanism | tokens | ms | dense / ours | peer / ours | MB, ours | MB, dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for (mechanism, length), systems in by_system(rows):
        ours, dense, peer = (systems.get(name, {}) for name in ("attn", "dense", "peer"))
        spread = times(*(1000 * ours[name] for name in ("min", "seconds", "max")))
        weights = " | ".join(f"{row['peak_bytes'] / MEGABYTE:.0f}" for row in (ours, dense))
        ratios = f"{ratio(dense, ours)} | {ratio(peer, ours)}"
        lines.append(f"| {mechanism} | {length} | {spread} | {ratios} | {weights} |")
    return lines


def by_system(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[str, int], dict[str, dict[str, Any]]]]:
    """The rows of each mechanism and length by system, where attn's ran."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        options = "".join(f" {name}={value}" for name, value in row["options"].items())
        systems = found.setdefault((row["mechanism"] + options, row["length"]), {})
        # Ratios are only computed within one run, which begins with the row of dense attention.
        if row["system"] == "dense":
            systems.clear()
        systems[row["system"]] = row
    return ((name, systems) for name, systems in found.items() if "seconds" in systems.get("attn", {}))


def of_steps(rows: Iterable[dict[str, Any]]) -> list[str]:
    """One row for each mechanism and length: attn's step beside that of gqa, and how fast it reads its bytes."""
    lines = ["| step of | after tokens | ms | gqa, ms | ours / gqa | MB read | of the memory's rate |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (mechanism, length), systems in by_system(rows):
        ours, dense = systems["attn"], systems["dense"]
        cells = [f"{1000 * row['seconds']:.2f}" for row in (ours, dense)]
        share = f"{ours['seconds'] / dense['seconds']:.2f} | {ours['read_bytes'] / MEGABYTE:.1f} | {ours['rate']:.2f}"
        lines.append(f"| {mechanism} | {length} | {cells[0]} | {cells[1]} | {share} |")
    return lines


def ratio(other: dict[str, Any], ours: dict[str, Any]) -> str:
    """The other's time divided by attn's; a dash if there is no other, or it did not run."""
    return f"{other['seconds'] / ours['seconds']:.2f}" if "seconds" in other else "-"


def of_recurrences(result: dict[str, Any]) -> list[str]:
    """One row for each kind of recurrence, length and pass: attn's and the other package's."""
    found: dict[tuple[int, str, bool], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["length"], row["kind"], row["backward"]), {})[row["system"]] = row
    lines = ["| recurrence | tokens | pass | ours, ms | fla-core, ms | fla-core / ours |", "|---|---|---|---|---|---|"]
    for (length, kind, backward), systems in found.items():
        if "ours" not in systems:
            continue
        ours, other = systems["ours"], systems["fla"]
        cells = [times(row["range"][0], row["milliseconds"], row["range"][1]) for row in (ours, other)]
        what = "forward and backward" if backward else "forward"
        ratio = other["milliseconds"] / ours["milliseconds"]
        lines.append(f"| {kind} | {length} | {what} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return lines


def said_of(result: dict[str, Any]) -> str:
    """A line with the command, its time, the number of threads and the machine's load."""
    machine = result["machine"]
    before = result.get("load", {}).get("before", [machine.get("load", 0.0)])[0]
    after = result.get("load", {}).get("after", [result.get("load_after", 0.0)])[0]
    threads = result.get("threads", machine.get("threads"))
    words = result.get("command", ["python", "benchmarks/recurrences_cpu.py"])
    command = shlex.join(words[: words.index("--out")] if "--out" in words else words)
    when = result.get("time", result.get("when"))
    return f"`{command}`, {when}, {threads} thread(s), load {before:.1f} before and {after:.1f} after"


def tables(results: list[dict[str, Any]]) -> str:
    """The table of all mechanisms and that of recurrences, each with the commands that measured it."""
    recurrences = [result for result in results if "milliseconds" in result["rows"][0]]
    steps = [result for result in results if "read_bytes" in result["rows"][0]]
    mechanisms = [result for result in results if result not in recurrences and result not in steps]
    written = []
    for table, kind in ((of_mechanisms, mechanisms), (of_steps, steps)):
        rows = [row for result in kind for row in result["rows"]]
        written += ["\n".join(table(rows)), "\n".join(f"- {said_of(result)}" for result in kind)]
    for result in recurrences:
        written += ["\n".join(of_recurrences(result)), f"- {said_of(result)}"]
    return "\n\n".join(written)


def main() -> None:
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
