"""Registers the packages of this tree on machines where they are not installed, so that their plugins are found."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "attn-core",
    "attn-schema",
    "attn-variants",
    "attn-cache",
    "attn-kernels-triton",
    "attn-models",
    "attn-engine",
)


def make_known() -> None:
    """Write metadata of the packages that are not installed into a folder and add it to `sys.path`.

    The packages' sources must be on the path already.
    """
    folder = Path(tempfile.mkdtemp(prefix="attn-known-"))
    for name in NEEDED:
        try:
            distribution(name)
        except PackageNotFoundError:
            manifest = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))
            describe(manifest["project"], folder)
    sys.path.append(str(folder))


def describe(project: dict[str, Any], folder: Path) -> None:
    """Write the dist-info of a package: its metadata and entry points."""
    name, version = project["name"], project["version"]
    said = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    said.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in project.get("dependencies", []))
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    points = project.get("entry-points", {})
    lines = [line for group, own in points.items() for line in (f"[{group}]", *(f"{n} = {t}" for n, t in own.items()))]
    (said / "entry_points.txt").write_text("\n".join(lines) + "\n")
