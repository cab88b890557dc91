"""Finding and loading plugins, so that a broken plugin is reported and does not affect the others.

pluggy's own loader silently skips the second plugin of one name, and a plugin that raises at import prevents all
later ones from loading; therefore entry points are read here and registered one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageMetadata,
    PackageNotFoundError,
    distribution,
    distributions,
    version,
)
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from attn_core.plugins import hooks

GROUP = "attn.plugins"
CORE = "attn-core"
SELECTION = "ATTN_PLUGINS"
"""Environment variable: distributions whose plugins are loaded, separated by commas; unset loads all."""


class PluginStatus(StrEnum):
    """The outcome of loading a plugin."""

    OK = "ok"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    MISSING_DEPENDENCY = "missing dependency"
    NOT_SELECTED = "not selected"


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """One entry point of the group and the outcome of loading it.

    `reason` explains any status but OK, and says which of its items have names that are built in.
    """

    distribution: str
    version: str
    name: str
    target: str
    status: PluginStatus
    reason: str = ""

    @property
    def full_name(self) -> str:
        """`distribution/name`: two distributions may use one entry point name."""
        return f"{self.distribution}/{self.name}"


def load_plugins(manager: pluggy.PluginManager, environ: Mapping[str, str] = os.environ) -> list[PluginRecord]:
    """Load every compatible plugin into `manager`, registered under its distribution; never raises for a plugin."""
    selected = environ.get(SELECTION)
    names = None if selected is None else {canonicalize_name(n.strip()) for n in selected.split(",") if n.strip()}
    return [record for owner in _owners() for record in _load_all(manager, owner, names)]


def changed_since(records: Iterable[PluginRecord]) -> list[str]:
    """Distributions with plugins that were installed, or changed their version, after these records were made, each as
    "distribution version".
    """
    known = {record.distribution: record.version for record in records}
    now = {owner: version(owner) for owner in _owners()}
    return [f"{owner} {found}" for owner, found in now.items() if known.get(owner) not in ("", found)]


def _owners() -> list[str]:
    """Distributions that offer plugins, sorted.

    Of other distributions only the entry points are read: the metadata of some hundred would take most of a second.
    """
    names = {dist.metadata["Name"] or "" for dist in distributions() if GROUP in _entry_points_text(dist)}
    return sorted(canonicalize_name(name) for name in names if name)


def _entry_points_text(dist: Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, UnicodeError):  # a damaged file, which may belong to a distribution without plugins
        return ""


def _load_all(manager: pluggy.PluginManager, owner: str, names: set[Any] | None) -> list[PluginRecord]:
    # Of two distributions of one name, the first on the path is the one that imports; the other is shadowed.
    dist = distribution(owner)
    try:
        points = sorted(point for point in dist.entry_points if point.group == GROUP)
    except Exception as error:  # noqa: BLE001  # whatever the parser makes of a damaged file
        reason = f"entry_points.txt: {type(error).__name__}: {error}"
        broken = PluginStatus.BROKEN
        return [PluginRecord(distribution=owner, version="", name="", target="", status=broken, reason=reason)]
    metadata = dist.metadata  # read once: every access parses the file again
    if names is not None and owner not in names:
        unmet: tuple[PluginStatus, str] | None = (PluginStatus.NOT_SELECTED, f"{SELECTION} does not name {owner}")
    else:
        unmet = _unmet_requirement(metadata)
    return [_load(manager, owner, metadata, point, unmet) for point in points]


def _load(
    manager: pluggy.PluginManager,
    owner: str,
    metadata: PackageMetadata,
    point: EntryPoint,
    unmet: tuple[PluginStatus, str] | None,
) -> PluginRecord:
    def record(status: PluginStatus, reason: str = "") -> PluginRecord:
        return PluginRecord(
            distribution=owner,
            version=metadata["Version"] or "",
            name=point.name,
            target=point.value,
            status=status,
            reason=reason,
        )

    if unmet:
        return record(*unmet)
    try:
        _register(manager, point.load(), f"{owner}:{point.name}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a plugin may raise anything at import, SystemExit too
        return record(PluginStatus.BROKEN, f"{type(error).__name__}: {error}")
    return record(PluginStatus.OK)


def _unmet_requirement(metadata: PackageMetadata) -> tuple[PluginStatus, str] | None:
    """Why the requirements of a distribution are not met, from its metadata alone; None if they are."""
    for text in metadata.get_all("Requires-Dist") or ():
        try:
            need = Requirement(text)
        except InvalidRequirement as error:
            return PluginStatus.BROKEN, f"metadata: {error}"
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        if not _is_installed(need.name):
            return PluginStatus.MISSING_DEPENDENCY, f"needs {need}, which is not installed"
        if canonicalize_name(need.name) != CORE:
            continue
        core = _core_version()
        if not need.specifier.contains(core, prereleases=True):
            return PluginStatus.INCOMPATIBLE, f"requires {need}, but {CORE} {core} is installed"
    return None


@cache
def _is_installed(name: str) -> bool:
    """Whether a distribution is installed; its metadata is not read, because torch's alone takes milliseconds."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@cache
def _core_version() -> str:
    return version(CORE)


def _register(manager: pluggy.PluginManager, plugin: ModuleType | object, name: str) -> None:
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
        _require_hooks(manager, plugin)
    except BaseException:
        # pluggy does not undo the registration when it finds an error.
        if manager.get_plugin(name) is plugin:
            manager.unregister(plugin)
        raise


def _require_hooks(manager: pluggy.PluginManager, plugin: ModuleType | object) -> None:
    """Raise `TypeError` for a function that has the name of a hook but no marker, and for a plugin without hooks."""
    known = [name for name in vars(hooks) if name in vars(manager.hook)]
    for name in known:
        if callable(getattr(plugin, name, None)) and manager.parse_hookimpl_opts(plugin, name) is None:
            raise TypeError(f"{name} is not marked as a hook: decorate it with @attn_core.hookimpl")
    if not manager.get_hookcallers(plugin):
        raise TypeError(f"implements none of the hooks {', '.join(known)}, decorated with @attn_core.hookimpl")


def new_manager() -> pluggy.PluginManager:
    """Create a plugin manager with the hook specifications and no plugins."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager
