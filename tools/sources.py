"""Python sources as syntax trees, for the checks that read code without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

import workspace

GENERATED = ("_pb2.py", "_pb2_grpc.py")
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the text."""
        return ast.parse(self.text, self.path)

    @property
    def length(self) -> int:
        """The number of lines, including blank lines and comments."""
        return len(self.text.splitlines())

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function and method with its qualified name (`Class.method`)."""
        yield from _functions(self.tree, "")

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, module) of every import that is executed at some time, which excludes those under TYPE_CHECKING."""
        yield from _imports(self.tree)

    def late_imports(self) -> set[tuple[int, str]]:
        """The imports inside functions, which are executed when the function is called."""
        return {found for _, function in self.functions() for found in _imports(function)}


@cache
def below(folder: Path) -> tuple[Source, ...]:
    """Every hand-written Python file below a folder, in order of path."""
    paths = sorted(path for path in folder.rglob("*.py") if not path.name.endswith(GENERATED))
    return tuple(Source(path.relative_to(workspace.ROOT).as_posix(), path.read_text("utf-8")) for path in paths)


def of_packages() -> tuple[Source, ...]:
    """The sources of every package, without tests."""
    return tuple(source for package in workspace.packages().values() for source in below(package.source))


def of_tests() -> tuple[Source, ...]:
    """The tests of every package, and those of the repository as a whole."""
    folders = [package.tests for package in workspace.packages().values()] + [workspace.ROOT / "tests"]
    return tuple(source for folder in folders for source in below(folder))


def of_scripts() -> tuple[Source, ...]:
    """The Python files that belong to no package and are no tests: noxfile, tools, demo, benchmarks and docs."""
    folders = [workspace.ROOT / name for name in ("tools", "demo", "benchmarks", "docs")]
    noxfile = Source("noxfile.py", (workspace.ROOT / "noxfile.py").read_text("utf-8"))
    return (noxfile, *(source for folder in folders for source in below(folder)))


def dotted(node: ast.AST) -> str:
    """The dotted name of a name or attribute node, such as `a.b.c`; empty for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.lineno, child.module
        elif isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING"):
            for otherwise in child.orelse:
                yield from _imports(otherwise)
        else:
            yield from _imports(child)
