"""Releases of attn-core that plugins may still be used with: releases.toml says which commits they are."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import workspace
from packaging.version import Version

CORE = "attn-core"


def oldest(plugin: workspace.Package, core: workspace.Package) -> tuple[str, str | None]:
    """The oldest version of the core that a plugin admits, and its commit, None where it is this tree's.

    Raises `LookupError` where neither a release nor this tree has such a core.
    """
    (need,) = (need for need in plugin.needs if need.name == CORE)
    released: dict[str, str] = tomllib.loads((workspace.ROOT / "releases.toml").read_text()).get(CORE, {})
    admitted = sorted(need.specifier.filter([*released, core.version]), key=Version)
    if not admitted:
        raise LookupError(f"{plugin.name} asks for {need}, but neither releases.toml nor this tree has such a core")
    return admitted[0], released.get(admitted[0])


def unpack(commit: str, target: Path) -> Path:
    """The folder of the core as it was at a commit, below an empty `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    archive = target / "core.tar"
    command = ["git", "archive", "-o", str(archive), commit, f"packages/{CORE}"]
    subprocess.run(command, cwd=workspace.ROOT, check=True)
    shutil.unpack_archive(archive, target)
    return target / "packages" / CORE
