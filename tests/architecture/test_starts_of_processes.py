"""A process that cannot be started is one error with its cause: a search through all sources for starts without it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for kind in ("packages", "services", "plugins") for path in ROOT.glob(f"{kind}/*/src/**/*.py")]
STARTS = {
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.posix_spawn", "os.fork"),
}


def not_in_starting(node: ast.AST, *, inside: bool = False) -> Iterator[int]:
    """Yield the lines on which a process is started outside of `with starting(...)`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS and not inside:
        yield node.lineno
    inside |= isinstance(node, ast.With) and any(
        ast.unparse(item.context_expr).startswith("starting(") for item in node.items
    )
    for below in ast.iter_child_nodes(node):
        yield from not_in_starting(below, inside=inside)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("subprocess.run(['a'])", [1]),
        ("with subprocess.Popen(['a']) as child: pass", [1]),
        ("with starting('a'):\n    child = subprocess.Popen(['a'])", []),
        ("with starting('a'):\n    pass\nsubprocess.run(['a'])", [3]),
    ],
)
def test_the_search_finds_bare_starts(source: str, found: list[int]) -> None:
    assert list(not_in_starting(ast.parse(source))) == found


def test_all_processes_are_started_with_their_error() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in not_in_starting(ast.parse(path.read_text("utf-8")))
    }
    assert not found
