"""The commands `attn list`, `attn plugins` and `attn doctor`, about what is installed and whether it works."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.plugins.catalog import Catalog
from attn_core.plugins.hooks import Finding
from attn_core.plugins.loader import PluginStatus
from attn_core.plugins.registry import Registry
from attn_schema.cores import usable_cores
from attn_schema.home import home_folder
from attn_schema.output import Json, print_json, print_rows, print_table

from attn_cli.facts import by_use
from attn_cli.main import FlagCommand, FlagGroup
from attn_cli.output import human_bytes
from attn_cli.recipe import recipe_names, recipe_summary


class Kinds(FlagGroup):
    """The group of the kinds that can be listed, with an error for other kinds that names them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command that lists a kind; raises `InvalidValue` for an unknown kind."""
        if cmd_name not in self.commands:
            raise InvalidValue.of("what to list", cmd_name, f"one of {', '.join(self.commands)}")
        return super().get_command(ctx, cmd_name)


list_command = typer.Typer(cls=Kinds, add_completion=False, rich_markup_mode="markdown")
"""The group with a command per kind. Their only option is a flag, so that Typer loads no code for other types."""


@list_command.callback(invoke_without_command=True)
def root(context: typer.Context, json: Json = False) -> None:
    """List what is installed: mechanisms, if no kind is given.

    `attn list mechanisms` lists the values for `attn train --mechanism`. Each row names the package of a mechanism;
    install or write a package, and its mechanisms appear here. `attn show NAME` shows the details of one.
    """
    if context.invoked_subcommand is None:
        print_kind("mechanisms", json)


def print_kind(kind: str, json: bool) -> None:
    """Print the installed objects of a kind, a key of `ROWS`."""
    print_rows(ROWS[kind](installed()), f"no {kind} are installed", json=json)


def plugins(catalog: Catalog) -> list[dict[str, Any]]:
    """List all plugins found, loaded or not, one per row."""
    return [
        {"plugin": record.full_name, "version": record.version, "status": record.status.value, "reason": record.reason}
        for record in catalog.plugins
    ]


def mechanisms(catalog: Catalog) -> list[dict[str, Any]]:
    """List the installed mechanisms, one per row."""
    rows = []
    owners = dict(_owned(catalog.mechanisms))
    for item in by_use(owners):
        owner = owners[item]
        rows.append({"name": item.name, "summary": item.summary, "paper": item.paper.cited, "package": owner})
    return rows


def kernels(catalog: Catalog) -> list[dict[str, Any]]:
    """List the installed kernels, one per row, with the reason if one cannot run here."""
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
    """List the kernels of linear layers, one per row, with the format in which each stores weights."""
    return [
        {"name": item.name, "weights": item.weights, **_use(item, owner)} for item, owner in _owned(catalog.linears)
    ]


def blocks(catalog: Catalog) -> list[dict[str, Any]]:
    """List the kernels of whole blocks, one per row."""
    return [{"name": item.name, **_use(item, owner)} for item, owner in _owned(catalog.blocks)]


def _use(item: Any, owner: str) -> dict[str, Any]:
    return {"summary": item.summary, "here": item.available() or "yes", "package": owner}


def _summaries(registry: Registry[Any]) -> list[dict[str, Any]]:
    return [{"name": item.name, "summary": item.summary, "package": owner} for item, owner in _owned(registry)]


def _owned(registry: Registry[Any]) -> list[tuple[Any, str]]:
    return [(registry.get(name), registry.owner(name)) for name in registry.names()]


def _caches(catalog: Catalog) -> list[dict[str, Any]]:
    """List the caches for keys, values and other states, one per row."""
    return _summaries(catalog.caches)


def _models(catalog: Catalog) -> list[dict[str, Any]]:
    """List the model families, one per row."""
    return _summaries(catalog.models)


def _shapes(catalog: Catalog) -> list[dict[str, Any]]:
    """List the published sizes of known models, one per row."""
    return _summaries(catalog.shapes)


def _rewards(catalog: Catalog) -> list[dict[str, Any]]:
    """List the rewards of completions, one per row; `attn train --reward-funcs NAME` uses one."""
    return _summaries(catalog.rewards)


def _recipes(_: Catalog) -> list[dict[str, Any]]:
    """List the included training recipes, one per row; `attn train --recipe NAME` uses one."""
    return [{"name": name, "summary": recipe_summary(name)} for name in recipe_names()]


def _datasets(catalog: Catalog) -> list[dict[str, Any]]:
    """List the datasets that have a name, one per row; `attn train --dataset NAME` uses one."""
    return [
        {"name": data.name, "kind": data.kind, "summary": data.summary, "package": owner}
        for owner, data in sorted(catalog.offers("attn_datasets"), key=lambda offer: offer[1].name)
    ]


ROWS: dict[str, Callable[[Catalog], list[dict[str, Any]]]] = {
    "mechanisms": mechanisms,
    "kernels": kernels,
    "linears": linears,
    "blocks": blocks,
    "caches": _caches,
    "models": _models,
    "shapes": _shapes,
    "recipes": _recipes,
    "datasets": _datasets,
    "rewards": _rewards,
    "plugins": plugins,
}


def _add(kind: str) -> None:
    def listed(context: typer.Context, json: Json = False) -> None:
        before = context.parent.params["json"] if context.parent else False
        print_kind(kind, json or before)

    listed.__doc__ = ROWS[kind].__doc__
    list_command.command(kind, cls=FlagCommand)(listed)


for _kind in ROWS:
    _add(_kind)


def plugins_command(json: Json = False) -> None:
    """List every plugin found, and why one did not load.

    A plugin that raises, exits, lacks a dependency or was built for another version of attn-core is listed with the
    reason, and the others still load. `ATTN_PLUGINS=attn-variants,attn-cli attn ...` loads only the packages named.
    """
    print_kind("plugins", json)


def doctor_command(json: Json = False) -> None:
    """Check this machine and installation; exit code 1 if a check fails.

    Packages add checks of their own, such as the Ray version or the folder of models.
    """
    findings = own_findings()
    for owner, check in installed().offers("attn_doctor_checks"):
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001  a plugin's check may fail in any way and is itself a finding
            findings.append(
                Finding(subject=owner, ok=False, detail=f"the check itself failed: {type(error).__name__}: {error}")
            )
    rows = [{"subject": f.subject, "ok": "yes" if f.ok else "NO", "detail": f.detail} for f in findings]
    if json:
        print_json([{"subject": f.subject, "ok": f.ok, "detail": f.detail} for f in findings])
    else:
        print_table(rows, "nothing to check")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def own_findings() -> list[Finding]:
    """The checks of the command line itself: Python, torch and plugins."""
    python = sys.version_info >= (3, 11)
    findings = [
        Finding(subject="python", ok=python, detail=f"{platform.python_version()}, {usable_cores()} cores"),
        _torch(),
        _home(),
    ]
    for record in installed().plugins:
        ok = record.status in (PluginStatus.OK, PluginStatus.NOT_SELECTED)
        detail = f"{record.version} {record.status}" + (f": {record.reason}" if record.reason else "")
        findings.append(Finding(subject=record.full_name, ok=ok, detail=detail))
    return findings


def _home() -> Finding:
    """Whether files can be written where models and jobs are kept, which may not exist yet."""
    home = home_folder()
    nearest = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = human_bytes(shutil.disk_usage(nearest).free)
    except OSError as error:
        return Finding(subject="home", ok=False, detail=f"{home} cannot be written: {error.strerror}; see ATTN_HOME")
    return Finding(subject="home", ok=True, detail=f"{home}, {free} free")


def _torch() -> Finding:
    try:
        return Finding(subject="torch", ok=True, detail=version("torch"))
    except PackageNotFoundError:
        return Finding(subject="torch", ok=True, detail="not installed; commands that compute with tensors do not work")
