"""The parts that the GPU measurements name exist: they run where no test of this repository does."""

from __future__ import annotations

import ast
import re

import pytest
import workspace

FOLDER = workspace.ROOT / "benchmarks" / "gpu"
NAMED = re.compile(r"[a-z_]+\.[a-z_]+")


def named(script: str) -> set[str]:
    """Every "module.function" that a script says."""
    tree = ast.parse((FOLDER / script).read_text("utf-8"))
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Part"]
    words = [[a.value for a in n.args[:2] if isinstance(a, ast.Constant)] for n in calls]
    parts = {".".join(map(str, pair)) for pair in words if len(pair) == 2}
    return {string for string in strings if NAMED.fullmatch(string)} | parts


def functions(module: str) -> set[str]:
    """The functions of a module of the folder; none where it does not exist."""
    path = FOLDER / f"{module}.py"
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("script", ["everything.py", "sanitizer.py"])
def test_every_part_that_is_named_exists(script: str) -> None:
    parts = named(script)
    missing = sorted(part for part in parts if part.partition(".")[2] not in functions(part.partition(".")[0]))
    assert parts
    assert not missing
