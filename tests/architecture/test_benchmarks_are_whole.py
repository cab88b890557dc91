"""What benchmarks name is there, whether or not a test runs them: names of this tree, and parts of one another."""

from __future__ import annotations

import ast
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import sources
import workspace

FOLDER = workspace.ROOT / "benchmarks" / "gpu"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
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


def module_file(module: str) -> Path | None:
    """The file of a module of this tree; None if there is none."""
    place = Path(*module.split("."))
    bases = [package.source / place for package in workspace.packages().values()]
    return next((f for base in bases for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)


def bound(file: Path) -> set[str]:
    """The names that a module binds outside its functions and classes."""
    tree = ast.parse(file.read_text("utf-8"))
    inside = {n for outer in tree.body if isinstance(outer, FUNCTION | ast.ClassDef) for n in ast.walk(outer)}
    names = {n.name for n in tree.body if isinstance(n, FUNCTION | ast.ClassDef)}
    for node in set(ast.walk(tree)) - inside:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def missing(source: sources.Source) -> list[str]:
    """What a script imports of this tree that is not there."""
    ours = tuple(name for package in workspace.packages().values() for name in package.imports)
    imports = [node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
    found = []
    for module, names in [(str(node.module), node.names) for node in imports]:
        if module.startswith(ours) and "_pb2" not in module:
            file = module_file(module)
            there = set() if file is None else bound(file)
            absent = [name.name for name in names if name.name not in there]
            found += [f"{module}.{name}" for name in absent if module_file(f"{module}.{name}") is None]
    return found


def test_what_scripts_import_of_this_tree_is_there() -> None:
    assert {source.path: absent for source in sources.of_scripts() if (absent := missing(source))} == {}


def test_an_import_of_what_is_not_there_is_found() -> None:
    text = "from attn_core.gone import x\nfrom attn_core.errors import Gone, AttnError\nfrom attn_core import masks"
    assert missing(sources.Source("script.py", text)) == ["attn_core.gone.x", "attn_core.errors.Gone"]


def uncited(results: list[str], text: str) -> list[str]:
    """The results that a text names neither as they are nor by a pattern such as `mechanisms-cpu-*.json`."""
    named = set(re.findall(r"\w[\w.*-]*(?=\.(?:json|png))|(?<=write_report\(\")[\w-]+", text))
    return [name for name in results if not any(fnmatch(Path(name).stem, pattern) for pattern in named)]


def test_every_result_that_is_kept_is_cited_by_a_page_a_test_or_a_script() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=workspace.ROOT, capture_output=True, text=True, check=True)
    files = [Path(line) for line in listed.stdout.splitlines()]
    results = [path.name for path in files if path.parts[:2] == ("benchmarks", "results")]
    pages = [workspace.ROOT / path for path in files if path.suffix in {".md", ".py", ".toml"}]
    assert uncited(results, "\n".join(path.read_text("utf-8") for path in pages if path.exists())) == []


def test_a_result_that_nothing_cites_is_found() -> None:
    assert uncited(["a-1.json", "b.png", "c.json"], "see a-*.json and [b](results/b.png), not *.json") == ["c.json"]
