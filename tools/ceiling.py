"""The most that the tree may weigh, and its flows may run through: counts it, compares it with what is allowed.

    python tools/ceiling.py           print what is counted and what is allowed
    python tools/ceiling.py --write   allow what is counted, with room for small changes

A number is allowed up to the next hundred that leaves fifty free (ten and five for the functions of a flow): a good
change of some lines passes, and one of many lines says what it buys.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import tokenize
import tomllib
from pathlib import Path

import flows
import sources
import workspace

RECORD = workspace.ROOT / "tests" / "architecture" / "ceiling.toml"
TO_BE_COPIED = {"attn-olmo2", "attn-plugin-template"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
STEPS = {"source-lines": 100, "code-lines": 100, "computing-lines": 100, "functions": 10}
"""To which multiple a number is rounded up; the others are allowed as they are counted."""
Numbers = dict[str, int]


def code_lines(text: str) -> int:
    """Lines with a token that computes: no blanks, comments, docstrings or imports."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            documents = all(part.type == tokenize.STRING for part in statement)
            if statement and not documents and statement[0].string not in {"import", "from"}:
                lines.update(line for part in statement for line in range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def weight() -> Numbers:
    """What the table `weight` limits, counted in this tree."""
    tree = workspace.packages()
    files = sources.of_packages()
    computing = [
        path for package in tree.values() for end in ("*.cpp", "*.hpp", "*.toml") for path in package.source.rglob(end)
    ]
    computing += (workspace.ROOT / "tools").glob("*.py")
    return {
        "packages": sum(not package.is_plugin or name in TO_BE_COPIED for name, package in tree.items()),
        "source-lines": sum(source.length for source in files),
        "code-lines": sum(code_lines(source.text) for source in files),
        "computing-lines": sum(len(path.read_text("utf-8").splitlines()) for path in computing),
    }


def flow(name: str, folder: Path) -> Numbers:
    """How many files and functions of ours a warm flow runs through."""
    trace = flows.Trace(folder)
    flows.WARM[name](trace)
    return {"files": len(trace.files), "functions": len(trace.functions)}


def allowed() -> dict[str, Numbers]:
    """The numbers on record by the name of their table: `weight`, `flows.layer` and so on."""
    record = tomllib.loads(RECORD.read_text("utf-8"))
    return {"weight": record["weight"]} | {f"flows.{name}": limits for name, limits in record["flows"].items()}


def over(counted: Numbers, limits: Numbers) -> dict[str, tuple[int, int]]:
    """What is more than allowed: the number counted, and the limit."""
    return {name: (number, limits[name]) for name, number in counted.items() if number > limits[name]}


def limit(name: str, counted: int) -> int:
    """The limit for what was counted, with half a step of room or more."""
    step = STEPS.get(name, 1)
    return -(-(counted + step // 2) // step) * step


def written(text: str, table: str, counted: Numbers) -> str:
    """The text of the record with new limits in a table."""
    head, title, rest = text.partition(f"[{table}]\n")
    own, bracket, others = rest.partition("\n[")
    for name, number in counted.items():
        own = re.sub(rf"^({name} = )\d+", rf"\g<1>{limit(name, number)}", own, flags=re.MULTILINE)
    return head + title + own + bracket + others


def main() -> None:
    """Print the table, and with --write allow what was counted."""
    counted = {"weight": weight()}
    for name in flows.WARM:
        with tempfile.TemporaryDirectory() as folder:
            counted[f"flows.{name}"] = flow(name, Path(folder))
    for table, numbers in counted.items():
        for name, number in numbers.items():
            print(f"{table:18}{name:18}{number:8} of {allowed()[table][name]}")
        if "--write" in sys.argv:
            RECORD.write_text(written(RECORD.read_text("utf-8"), table, numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
