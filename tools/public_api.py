"""Writes every public name of every package as text, so that changes of the public API are visible in review.

    python tools/public_api.py           write tests/public_api/*.txt anew
    python tools/public_api.py --check   fail if they are not up to date

Public are the names without leading underscore in a package's top-level modules and in the `__init__.py` of its
sub-packages. A function is listed with its parameters (`=` if optional), a class with its attributes and methods.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import sources
import workspace

FOLDER = workspace.ROOT / "tests" / "public_api"
HEADER = "# Written by `python tools/public_api.py`. What disappears or changes here breaks somebody.\n"


def surface(package: workspace.Package) -> str:
    """The text for one package: one line for each public name, sorted."""
    lines = {line for path in public_modules(package) for line in module_names(path, dotted_name(path, package))}
    return HEADER + "".join(f"{line}\n" for line in sorted(lines))


def public_modules(package: workspace.Package) -> Iterator[Path]:
    """The top-level modules of the package and the `__init__.py` of its sub-packages, without generated modules."""
    for root in (package.source.joinpath(*name.split(".")) for name in package.imports):
        found = [*root.glob("*.py"), *root.glob("*/__init__.py")] if root.is_dir() else [root.with_suffix(".py")]
        for path in found:
            parts = path.relative_to(package.source).with_suffix("").parts
            hidden = any(part.startswith("_") and part != "__init__" for part in parts)
            if not hidden and not path.name.endswith(sources.GENERATED):
                yield path


def dotted_name(path: Path, package: workspace.Package) -> str:
    """The module name of a file: `attn_core.masks` for .../src/attn_core/masks/__init__.py."""
    parts = path.relative_to(package.source).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def module_names(path: Path, module: str) -> Iterator[str]:
    """The public names of one module: those of `__all__` if it has one, else those that it defines."""
    body = ast.parse(path.read_text("utf-8")).body
    exported = declared_exports(body)
    defined = {name: node for node in body for name in names_of(node)}
    for name in exported if exported is not None else [name for name in defined if not name.startswith("_")]:
        node = defined.get(name)
        yield f"{module}.{name}" if node is None else f"{module}.{described(name, node)}"
        if isinstance(node, ast.ClassDef):
            yield from (f"{module}.{name}.{member}" for member in members(node))


def declared_exports(body: list[ast.stmt]) -> list[str] | None:
    """The value of `__all__` of a module, or None."""
    for node in body:
        if isinstance(node, ast.Assign) and "__all__" in names_of(node):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines; imports are not counted."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def members(node: ast.ClassDef) -> Iterator[str]:
    """The public attributes and methods that a class body defines."""
    for statement in node.body:
        for name in names_of(statement):
            if not name.startswith("_") or name in {"__init__", "__call__"}:
                yield described(name, statement)


def described(name: str, node: ast.stmt) -> str:
    """A name, with its parameters if it is a function."""
    return f"{name}{signature(node.args)}" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else name


def signature(given: ast.arguments) -> str:
    """The parameters in order, without `self` and `cls`, as in a call."""
    plain = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    required = len(plain) - len(given.defaults)
    words = [f"{name}=" if index >= required else name for index, name in enumerate(plain)]
    if given.posonlyargs:
        words.insert(len(given.posonlyargs), "/")
    if given.vararg or given.kwonlyargs:
        words.append(f"*{given.vararg.arg if given.vararg else ''}")
    words += [
        f"{argument.arg}=" if default else argument.arg
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    words += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(word for word in words if word not in {'self', 'cls'})})"


def main() -> None:
    """Write the texts, or with --check compare them."""
    wanted = {FOLDER / f"{name}.txt": surface(package) for name, package in workspace.packages().items()}
    present = {path: path.read_text("utf-8") for path in FOLDER.glob("*.txt")}
    if "--check" in sys.argv[1:]:
        stale = sorted(path.name for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))
        raise SystemExit(f"not up to date, run python tools/public_api.py: {', '.join(stale)}" if stale else 0)
    for path in present.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
