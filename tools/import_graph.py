"""The import graph of the modules of a package, and its cycles.

    python tools/import_graph.py             print every cycle of modules, one per line
    python tools/import_graph.py attn-core   only those of this package

All imports count: at the top of a file, inside a function, or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import sources
import workspace
from sources import Source

Graph = dict[str, set[str]]


def of_package(package: workspace.Package) -> Graph:
    """The modules of a package, each with the modules of the same package that it imports."""
    return graph({module_name(source.path, package): source for source in sources.below(package.source)})


def module_name(path: str, package: workspace.Package) -> str:
    """The module name of a file: `attn_core.masks` for packages/attn-core/src/attn_core/masks/__init__.py."""
    parts = PurePosixPath(path).relative_to(package.source.relative_to(workspace.ROOT)).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def graph(modules: Mapping[str, Source]) -> Graph:
    """The given modules, each with the other given modules that it imports."""
    return {name: set(imported(source, modules)) - {name} for name, source in modules.items()}


def imported(source: Source, modules: Mapping[str, Source]) -> Iterator[str]:
    """The given modules that a file imports; for `from package import name`, `package.name` if that is a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield from (name for name in [below if below in modules else node.module] if name in modules)


def circles(edges: Graph) -> list[tuple[str, ...]]:
    """The strongly connected components of more than one module (Tarjan 1972), each sorted by name."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(tuple(sorted(component)))

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return sorted(found)


def main() -> None:
    """Print the cycles of the packages named on the command line, or of all packages."""
    tree = workspace.packages()
    for name in sys.argv[1:] or tree:
        for circle in circles(of_package(tree[name])):
            print(*circle)


if __name__ == "__main__":
    main()
