"""Writes the table of docs/engine-speed.md from a result of `engine_cpu.py`.

    python benchmarks/engine_table.py benchmarks/results/engine-cpu.json

replaces the text between the two markers of the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "engine-speed.md"
BEGIN, END = "<!-- table of engine_cpu.py -->", "<!-- end of the table -->"
COLUMNS = ("batch 1", "batch 16", "batch 64", "prompt of 1000", "first token of 64 beside 16 streams, ms")


def cells_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The table cells of each system by column; a failure is reported in the first empty column."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        form = row.get("dtype") or row.get("form", "").replace("weights=", "--quantization ")
        if not form:
            continue
        cells = found.setdefault(f"{row['system']}, {form}", {})
        if "tokens_per_second" in row:
            cells["prompt of 1000" if "prompt" in row else f"batch {row['batch']}"] = f"{row['tokens_per_second']:g}"
        if "first_token_ms_beside_16" in row:
            cells[COLUMNS[-1]] = f"{row['first_token_ms_beside_16']:g}"
        if "trouble" in row:
            cells.setdefault(next(name for name in COLUMNS if name not in cells), row["trouble"])
    return found


def table(result: dict[str, Any]) -> str:
    """The text: a line that describes the run, then the table with one row for each system."""
    machine, load = result["machine"], f"load {result['machine']['load']:.1f} before, {result['load_after']:.1f} after"
    noted = f" Note: {result['note']}." if "note" in result else ""
    lines = [
        f"{machine['cpu']}, {result['threads']} threads, {result['new_tokens']} new tokens a request, {load}.{noted}",
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for system, cells in cells_of(result["rows"]).items():
        lines.append(f"| {system} | " + " | ".join(cells.get(name, "") for name in COLUMNS) + " |")
    for row in result["rows"]:
        if "percent_outside_the_model" in row:
            lines += [
                "",
                f"{row['form']}, batch {row['batch']}: {row['percent_outside_the_model']} % outside the model.",
            ]
        if "percent_of_uniform" in row:
            said = (
                f"{row['percent_of_uniform']} % of the rate of equal ones ({row['tokens_per_second_uniform']} tokens/s)"
            )
            form = f"{row['form']}, " if "form" in row else ""
            lines += ["", f"{form}{row['requests']} requests of mixed lengths, {row['running']} at a time: {said}."]
        if row.get("sampling", "greedy") != "greedy":
            more = (
                f"{row['percent_choosing']} % of a step ({row['percent_more_than_greedy']} % more than a greedy step)"
            )
            lines += ["", f"{row['form']}, batch {row['batch']}, {row['sampling']}: {more} to choose tokens."]
        if "megabytes_after_10000" in row:
            held = f"{row['megabytes_after_2000']} and {row['megabytes_after_10000']} MB"
            lines += ["", f"Memory after 2,000 and 10,000 requests: {held}."]
    return "\n".join(lines)


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
