"""Writes the generated pages of the site: the gallery, the commands, the API of each package, the wire format.

They are written to docs/reference when the site is built, and are not committed. Every package must be installed.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import public_api
import typer
import workspace
from attn_cli.facts import by_use
from attn_cli.main import application, load
from attn_core import installed
from typer.cli import get_docs_for_click

COURSE = workspace.ROOT / "docs" / "course"
EXAMPLE = workspace.ROOT / "docs" / "start" / "notebook.md"
FOLDER = workspace.ROOT / "docs" / "reference"
PROTOS = workspace.ROOT / "proto" / "attn" / "v1"


def write() -> None:
    """Write all pages anew."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    pages = {"gallery": gallery(), "commands": commands()}
    for package in workspace.packages().values():
        if modules := dict(api_modules(package)):
            pages[f"api/{package.name}"] = api(package, modules)
    for path in sorted(PROTOS.glob("*.proto")):
        pages[f"wire/{path.stem}"] = wire(path)
    pages["api/index"] = contents("API", "api")
    pages["wire/index"] = contents("Wire format", "wire")
    for path in (*COURSE.glob("[0-9]*.md"), EXAMPLE):
        pages[f"notebooks/{path.stem}.ipynb"] = notebook(path.read_text(encoding="utf-8"))
    for name, text in pages.items():
        target = FOLDER / (name if name.endswith(".ipynb") else f"{name}.md")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def gallery() -> str:
    """The gallery: all mechanisms by the year of their paper, each with its summary and equation."""
    found = by_use(installed().mechanisms.get(name) for name in installed().mechanisms.names())
    lines = ["# Mechanisms", "", f"{len(found)} mechanisms: those of well-known models, then all by year.", ""]
    lines += ["## In models of today", "", "| mechanism | what it is | in |", "|---|---|---|"]
    for mechanism in (one for one in found if one.used_by):
        link = f"[{mechanism.name}](../mechanisms/{mechanism.name}.md)"
        lines.append(f"| {link} | {mechanism.summary} | {', '.join(mechanism.used_by)} |")
    lines.append("")
    for year in sorted({mechanism.paper.year for mechanism in found}):
        lines += [f"## {year}", ""]
        for mechanism in sorted((one for one in found if one.paper.year == year), key=lambda one: one.name):
            lines += [f"[**{mechanism.name}**](../mechanisms/{mechanism.name}.md): {mechanism.summary}", ""]
            lines += ["$$", mechanism.equation, "$$", ""]
    names = "\n".join(f"../mechanisms/{mechanism.name}" for mechanism in found)
    return "\n".join(lines) + f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def commands() -> str:
    """The page of all subcommands of `attn` with their arguments and options, as `--help` describes them."""
    parts = ["# Commands\n"]
    for name in installed().commands.names():
        command = load(installed().commands.get(name))
        context = typer.Context(typer.main.get_command(application()), info_name="attn")
        text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="attn")
        parts.append(re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE))
    return "\n".join(parts).replace("[required]", r"\[required\]").replace("[default: ", r"\[default: ")


def api_modules(package: workspace.Package) -> Iterator[tuple[str, list[str]]]:
    """The public modules of a package, shortest names first, each with the names that no earlier module has."""
    seen: set[int] = set()
    paths = {public_api.dotted_name(path, package): path for path in public_api.public_modules(package)}
    for name in sorted(paths, key=lambda name: (name.count("."), name)):
        if re.search(r"(plugin|__main__|commands?)$", name):
            continue
        found = {line.removeprefix(f"{name}.").partition("(")[0] for line in public_api.module_names(paths[name], name)}
        module = importlib.import_module(name)
        # A lazily imported name is documented in the module that defines it.
        documented = {one for one in found if f"{name}.{one}" not in paths and not one.endswith("_command")}
        members = {one: vars(module)[one] for one in documented if one in vars(module)}
        own = [one for one, value in members.items() if id(value) not in seen and _defined_in(value, package)]
        seen |= {id(value) for value in members.values()}
        if own:
            yield name, sorted(own)


def _defined_in(value: object, package: workspace.Package) -> bool:
    """Whether a class or function is defined in the package, not re-exported; constants count as defined in it."""
    return getattr(value, "__module__", package.imports[0]).startswith(package.imports)


def api(package: workspace.Package, modules: dict[str, list[str]]) -> str:
    """The API page of one package, with a section for each public module."""
    lines = [f"# {package.name}", ""]
    for module, members in modules.items():
        lines += [f"## {module}", "", "```{eval-rst}", f".. automodule:: {module}"]
        lines += [f"   :members: {', '.join(members)}", "```", ""]
    return "\n".join(lines)


def contents(title: str, folder: str) -> str:
    """The page with the table of contents of a folder."""
    said = {"api": "What each package offers, from its docstrings.", "wire": "The messages and services of `attn.v1`."}
    return f"# {title}\n\n{said[folder]}\n\n```{{toctree}}\n:maxdepth: 1\n:glob:\n\n*\n```\n"


def notebook(text: str) -> str:
    """Convert a Markdown page to a notebook: Python blocks become code cells, the rest Markdown cells.

    Outputs that the page shows are left out, as the reader runs the cells.
    """
    cells: list[dict[str, Any]] = []
    code_only = re.sub(r"^```output\n.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    for odd, part in enumerate(re.split(r"^```python\n(.*?)^```\n", code_only, flags=re.DOTALL | re.MULTILINE)):
        code: dict[str, Any] = {"execution_count": None, "outputs": []} if odd % 2 else {}
        kind = "code" if odd % 2 else "markdown"
        if part.strip():
            cells.append({"cell_type": kind, "id": f"cell-{odd}", "metadata": {}, "source": part.strip()} | code)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}, indent=1)


@dataclass
class Block:
    """A service, message, enum or oneof of a .proto file: its comment, and its lines with their comments."""

    kind: str
    name: str
    comment: str
    rows: list[tuple[str, str]] = field(default_factory=list)


def wire(path: Path) -> str:
    """The messages and services of one .proto file as tables, with the comments above them."""
    lines = [f"# attn.v1: {path.stem}", ""]
    for block in blocks(path.read_text(encoding="utf-8")):
        lines += [f"## {block.kind} {block.name}", "", block.comment, ""]
        if block.rows:
            lines += ["| | |", "|---|---|"]
            lines += [f"| `{code}` | {comment.replace('|', chr(92) + '|')} |" for code, comment in block.rows]
            lines.append("")
    return "\n".join(lines)


def blocks(text: str) -> list[Block]:
    """The blocks of a formatted .proto file in order; a nested block follows the one that contains it."""
    found: list[Block] = []
    open_: list[Block] = []
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        said = " ".join(comment)
        if opened := re.match(r"(service|message|enum|oneof) (\w+) \{(\})?", line):
            block = Block(opened[1], opened[2], said)
            found.append(block)
            if not opened[3]:
                open_.append(block)
        elif line == "}" and open_:
            open_.pop()
        elif line.endswith(";") and open_:
            open_[-1].rows.append((line.rstrip(";"), said))
        comment = []
    return found


if __name__ == "__main__":
    sys.argv = ["attn"]
    write()
