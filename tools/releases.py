"""The releases of attn-core that plugins may still be used with; releases.toml lists their commits."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import workspace
from packaging.version import Version

CORE = "attn-core"


def oldest(plugin: workspace.Package, core: workspace.Package) -> tuple[str, str | None]:
    """The oldest version of attn-core that a plugin allows, and its commit, or None if it is this tree's version.

    Raises `LookupError` if neither a release nor this tree has an allowed version.
    """
    (need,) = (need for need in plugin.needs if need.name == CORE)
    released: dict[str, str] = tomllib.loads((workspace.ROOT / "releases.toml").read_text()).get(CORE, {})
    admitted = sorted(need.specifier.filter([*released, core.version]), key=Version)
    if not admitted:
        raise LookupError(f"{plugin.name} asks for {need}, but neither releases.toml nor this tree has such a core")
    return admitted[0], released.get(admitted[0])


def unpack(commit: str, target: Path) -> Path:
    """Extract attn-core as of a commit into `target`, which is emptied first; returns the package's folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    archive = target / "core.tar"
    command = ["git", "archive", "-o", str(archive), commit, f"packages/{CORE}"]
    subprocess.run(command, cwd=workspace.ROOT, check=True)
    shutil.unpack_archive(archive, target)
    return target / "packages" / CORE
