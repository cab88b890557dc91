"""Lines of given text are read in one way, which is attn_schema.text_files: a search through all sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for kind in ("packages", "services", "plugins") for path in ROOT.glob(f"{kind}/*/src/**/*.py")]
OF_MACHINES = {"chip.py", "cores.py"}
"""Files that read what the kernel says of the machine."""


def not_of_one_reader(tree: ast.AST) -> list[int]:
    """The lines on which text is split by `splitlines`, unless one line is taken of an error or of a program's output:
    those are what is left of a text of ours, in which nothing can be broken."""
    taken = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        for call in (node.value.values if isinstance(node.value, ast.BoolOp) else [node.value])
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "splitlines"
        and id(node) not in taken
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("for line in path.read_text().splitlines(): pass", [1]),
        ("lines = text.splitlines(keepends=True)", [1]),
        ("last = str(error).splitlines()[-1]", []),
        ("last = (str(error).splitlines() or [''])[0]", []),
        ("lines = lines_of(text)", []),
    ],
)
def test_the_search_finds_readers_of_their_own(source: str, found: list[int]) -> None:
    assert not_of_one_reader(ast.parse(source)) == found


def test_all_lines_of_text_are_read_by_one_reader() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if path.name not in OF_MACHINES
        for line in not_of_one_reader(ast.parse(path.read_text("utf-8")))
    }
    assert not found
