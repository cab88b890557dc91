"""Writes docs/conformance.md: the verdicts of the laws on the implementations in tools/conformance.toml.

    python tools/conformance.py [--only WORD]

`nox -s conformance` installs the pinned packages and runs this. Each implementation is judged in a process of its own.
What is not kept is published with a sentence that a person wrote after repeating it by hand; without one, it is printed
and nothing is written. With --only, the implementations whose name contains the word are judged and printed alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Timer
from typing import Any

import workspace

LIST = workspace.ROOT / "tools" / "conformance.toml"
PAGE = workspace.ROOT / "docs" / "conformance.md"
SECONDS = 1800
PROCESSES = 2
ROW = "judged: "
WORDS = {"kept": "✓", "not asked": "·"}
"""How verdicts are written in the table; others are as they are."""


def main() -> None:
    """Judge all implementations, and write the page if all verdicts were checked."""
    listed = tomllib.loads(LIST.read_text("utf-8"))
    entries, word = listed["implementations"], sys.argv[2] if sys.argv[1:2] == ["--only"] else ""
    chosen = [entry for entry in entries if word in json.dumps(entry)]
    groups = [list(of) for _, of in groupby(chosen, key=package)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = [each for group in pool.map(in_a_process, groups) for each in group]
    missing = [line for entry, rows in found for line in unchecked(entry, rows, listed["errors"])]
    print("\n".join(missing) or "every verdict was checked by hand")
    if word:
        return
    if missing:
        sys.exit(f"{len(missing)} verdicts were not checked by hand or have changed: nothing is written")
    PAGE.write_text(page(found, listed), "utf-8")
    print(f"wrote {PAGE}")


def package(entry: dict[str, Any]) -> str:
    """The package that an implementation is imported from."""
    return str(entry["object"]).partition(":")[0].partition(".")[0]


def in_a_process(group: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The implementations of one package, with what `judged` says of each, or the reason why there is nothing."""
    extra = {"TRITON_INTERPRET": "1", "FLA_CONV_BACKEND": "triton"} if group[0].get("interpreted") else {}
    command = [sys.executable, __file__, "--judge", json.dumps(group)]
    found: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **extra}) as process:
        timer = Timer(SECONDS, process.kill)
        timer.start()
        for line in process.stdout or ():
            if line.startswith(ROW):
                found.append(json.loads(line.removeprefix(ROW)))
                print(named(group[len(found) - 1]), found[-1].get("refused", ""), file=sys.stderr, flush=True)
        timer.cancel()
    left = {"refused": f"its process was not done after {SECONDS} seconds, or ended"}
    return list(zip(group, found + [left] * (len(group) - len(found)), strict=True))


def judged(entry: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on one implementation as JSON: by law, the word and what it says."""
    from attn_core.errors import UserError
    from attn_testing.foreign import examine, verdict

    if entry.get("interpreted"):
        interpret()
    padding = entry.get("padding")
    try:
        found = examine(
            entry["object"],
            options=entry.get("options", {}),
            causal=not entry.get("bidirectional", False),
            padding=tuple(padding) if padding else None,
            linear=entry.get("linear", False),
            multiple=entry.get("multiple", 1),
            silent=entry.get("silent", {}) | (INTERPRETED if entry.get("interpreted") else {}),
        )
    except UserError as error:
        return {"refused": str(error)}
    laws = {one.law: [verdict(one), one.detail.strip().partition("\n")[0], one.summary] for one in found.results}
    return {"package": found.package, "label": found.label, "laws": laws}


def interpret() -> None:
    """Let the kernels of flash-linear-attention run in Triton's interpreter, on a machine without a GPU."""
    import torch
    import triton

    class Cpu:
        """What fla asks of a device."""

        utils = type("Utils", (), {"get_device_properties": staticmethod(lambda _: {"multiprocessor_count": 1})})

        def get_current_target(self) -> Any:
            """The interpreter's target."""
            return type("Target", (), {"backend": "cpu", "arch": "", "warp_size": 32})

        def get_current_device(self) -> int:
            """The only device."""
            return 0

        def get_benchmarker(self) -> Any:
            """Nothing is measured."""
            return lambda *_, **__: [0.0, 0.0, 0.0]

        def get_active_torch_device(self) -> torch.device:
            """The CPU."""
            return torch.device("cpu")

    triton.runtime.driver.set_active(Cpu())
    torch.set_grad_enabled(False)


def sentence(entry: dict[str, Any], law: str, detail: str, errors: dict[str, str]) -> str | None:
    """What a person wrote about a law that is not kept."""
    if law in entry.get("says", {}):
        return str(entry["says"][law])
    return next((words for pattern, words in errors.items() if re.search(pattern, detail)), None)


def unchecked(entry: dict[str, Any], rows: dict[str, Any], errors: dict[str, str]) -> list[str]:
    """The verdicts without a sentence, and the sentences on laws that are kept."""
    name = f"{entry['object']} {json.dumps(entry.get('options', {}))}"
    if "refused" in rows:
        return [] if entry.get("refused") else [f"{name}: {rows['refused']}"]
    broken = {
        law: row for law, row in rows["laws"].items() if row[0] not in WORDS and law not in entry.get("silent", {})
    }
    new = [
        f"{name} {law}: {row[0]}: {row[1]}" for law, row in broken.items() if not sentence(entry, law, row[1], errors)
    ]
    return new + [f"{name} {law}: is now kept" for law in entry.get("says", {}) if law not in broken]


def page(found: list[tuple[dict[str, Any], dict[str, Any]]], listed: dict[str, Any]) -> str:
    """The page in Markdown."""
    able = [(entry, rows) for entry, rows in found if "laws" in rows]
    laws = list(able[0][1]["laws"])
    head = ["implementation", *(law.replace("_", " ") for law in laws)]
    packages = sorted({rows["package"] for _, rows in able}, key=str.lower)
    counts, lines, said = [], [], []
    for package in packages:
        mine = [(entry, rows) for entry, rows in able if rows["package"] == package]
        words = Counter(word(law, rows) for entry, rows in mine for law in laws)
        numbers = [words["✓"], words["**wrong**"], words["raises"], words["·"]]
        counts.append(f"| {package} | {len(mine)} | " + " | ".join(map(str, numbers)) + " |")
        table = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        for entry, rows in mine:
            cells = [named(entry), *(word(law, rows) for law in laws)]
            table.append("| " + " | ".join(cells) + " |")
            said += [f"- {named(entry)}: {case}" for case in cases(entry, rows, listed["errors"])]
        lines += [f"### {package}", "", *table, "", *said, ""]
        said = []
    refused = [f"- `{entry['object']}`: {entry['refused']}" for entry, rows in found if "refused" in rows]
    total = f"{len(able)} implementations of {len(packages)} packages, {len(laws)} laws."
    meaning = [f"| {law.replace('_', ' ')} | {row[2]} |" for law, row in able[0][1]["laws"].items()]
    head_of_counts = ["| package | implementations | kept | wrong | raises | not asked |", "|---|---|---|---|---|---|"]
    parts = [listed["head"].strip(), "", "| law | says |", "|---|---|", *meaning, "", "## Counts", "", total, ""]
    parts += [*head_of_counts, *counts, "", "## Verdicts", "", *lines]
    parts += ["## What cannot be judged here", "", *refused] if refused else []
    return "\n".join(parts).rstrip() + "\n"


def named(entry: dict[str, Any]) -> str:
    """An implementation in a cell: the object, its direction and its options."""
    given = "".join(f", {name}={value}" for name, value in entry.get("options", {}).items() if name not in QUIET)
    return f"`{entry['object'].rpartition(':')[2]}`{' bidirectional' if entry.get('bidirectional') else ''}{given}"


INTERPRETED = dict.fromkeys(("compiles", "price"), "its kernels run in Triton's interpreter")
"""The laws that are not asked of interpreted kernels."""
QUIET = frozenset({"dim_head", "depth", "verbose", "pad_token_id", "head_dim"})
"""Options of sizes that are not worth a word."""


def word(law: str, rows: dict[str, Any]) -> str:
    """The verdict on a law in a cell."""
    return WORDS.get(rows["laws"][law][0], rows["laws"][law][0])


def cases(entry: dict[str, Any], rows: dict[str, Any], errors: dict[str, str]) -> list[str]:
    """A line for each law that is not kept, or does not apply although it could be asked."""
    lines = [f"*{law.replace('_', ' ')}* does not apply: {why}" for law, why in entry.get("silent", {}).items()]
    for law, (found, detail, _) in rows["laws"].items():
        if word(law, rows) not in WORDS.values():
            said = sentence(entry, law, detail, errors)
            shown = re.sub(r"(causal|bidirectional): (LawBroken: )?", "", detail)
            lines.append(f"*{law.replace('_', ' ')}*, {found.strip('*')}: {said} ({shown})")
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        for one in json.loads(sys.argv[2]):
            print("\n" + ROW + json.dumps(judged(one)), flush=True)
    else:
        main()
