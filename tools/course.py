"""Runs the Python of the chapters of docs/course, and writes what each block prints below it.

    python tools/course.py           write the outputs anew
    python tools/course.py --check   fail if a block fails, or prints something else than its page shows

A chapter is one program, from top to bottom. What a block prints is in a block ```output``` after it. Numbers may
differ by a few hundredths from machine to machine.
"""

from __future__ import annotations

import io
import math
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import workspace

COURSE = workspace.ROOT / "docs" / "course"
CELL = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```output\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SLACK = 0.05
"""The difference between two numbers that is allowed: relative, and absolute below one."""


def chapters() -> list[Path]:
    """The chapters, in order."""
    return sorted(COURSE.glob("[0-9]*.md"))


def ran(text: str, name: str) -> str:
    """The text of a chapter with the outputs of its blocks, which run in one namespace."""
    variables: dict[str, object] = {"__name__": "__main__"}

    def one(cell: re.Match[str]) -> str:
        # Tracebacks give the line of the page.
        before = "\n" * text.count("\n", 0, cell.start("code"))
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(before + cell["code"], name, "exec"), variables)  # noqa: S102 -- our own documents
        lines = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").split("\n"))
        return f"```python\n{cell['code']}```\n" + (f"\n```output\n{lines}\n```\n" if lines else "")

    return CELL.sub(one, text)


def same(one: str, other: str) -> bool:
    """Whether two texts are equal but for small differences of their numbers."""
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", other).split():
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=SLACK, abs_tol=SLACK) for a, b in pairs)


def main() -> None:
    """Write the outputs, or with --check compare them."""
    wrong = []
    for path in chapters():
        text = path.read_text("utf-8")
        found = ran(text, str(path))
        if "--check" not in sys.argv[1:]:
            path.write_text(found, "utf-8")
        elif not same(text, found):
            wrong.append(path.name)
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: outputs are not those of the code: run python tools/course.py")


if __name__ == "__main__":
    main()
