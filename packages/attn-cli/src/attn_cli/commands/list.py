"""`attn list`."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from attn_core import Catalog, Registry, installed

from attn_cli.output import Json, print_json, print_table


class Kind(StrEnum):
    """What can be listed."""

    MECHANISMS = "mechanisms"
    KERNELS = "kernels"
    LINEARS = "linears"
    BLOCKS = "blocks"
    CACHES = "caches"
    MODELS = "models"
    SHAPES = "shapes"
    PLUGINS = "plugins"


def list_command(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.MECHANISMS, json: Json = False
) -> None:
    """List what is installed.

    `attn list mechanisms` is what a model's `--attention` may name. Each row names the package that owns it;
    install or write a package and its mechanisms appear here. `attn show NAME` tells more.
    """
    rows = ROWS[kind](installed())
    if json:
        print_json(rows)
    else:
        print_table(rows, f"no {kind} are installed")


def plugins(catalog: Catalog) -> list[dict[str, Any]]:
    """A row per plugin found, loaded or not."""
    return [
        {"plugin": record.full_name, "version": record.version, "status": record.status.value, "reason": record.reason}
        for record in catalog.plugins
    ]


def mechanisms(catalog: Catalog) -> list[dict[str, Any]]:
    """A row per mechanism."""
    rows = []
    for item, owner in _owned(catalog.mechanisms):
        paper = f"{item.paper.authors}, {item.paper.year}"
        rows.append({"name": item.name, "summary": item.summary, "paper": paper, "package": owner})
    return rows


def kernels(catalog: Catalog) -> list[dict[str, Any]]:
    """A row per kernel, with the reason where it cannot run here."""
    return [
        {
            "name": item.name,
            "operation": item.operation,
            "summary": item.summary,
            "here": item.available() or "yes",
            "package": owner,
        }
        for item, owner in _owned(catalog.kernels)
    ]


def linears(catalog: Catalog) -> list[dict[str, Any]]:
    """A row per kernel of linear layers, with the format it keeps weights in."""
    return [
        {"name": item.name, "weights": item.weights, **_use(item, owner)} for item, owner in _owned(catalog.linears)
    ]


def blocks(catalog: Catalog) -> list[dict[str, Any]]:
    """A row per kernel of whole blocks."""
    return [{"name": item.name, **_use(item, owner)} for item, owner in _owned(catalog.blocks)]


def _use(item: Any, owner: str) -> dict[str, Any]:
    return {"summary": item.summary, "here": item.available() or "yes", "package": owner}


def _summaries(registry: Registry[Any]) -> list[dict[str, Any]]:
    return [{"name": item.name, "summary": item.summary, "package": owner} for item, owner in _owned(registry)]


def _owned(registry: Registry[Any]) -> list[tuple[Any, str]]:
    return [(registry.get(name), registry.owner(name)) for name in registry.names()]


ROWS: dict[Kind, Callable[[Catalog], list[dict[str, Any]]]] = {
    Kind.MECHANISMS: mechanisms,
    Kind.KERNELS: kernels,
    Kind.LINEARS: linears,
    Kind.BLOCKS: blocks,
    Kind.CACHES: lambda catalog: _summaries(catalog.caches),
    Kind.MODELS: lambda catalog: _summaries(catalog.models),
    Kind.SHAPES: lambda catalog: _summaries(catalog.shapes),
    Kind.PLUGINS: plugins,
}
