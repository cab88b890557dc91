"""Writes constraints.txt: one pin for each distribution that a package or a check of this repository installs.

nox -s lock                      the newest releases that the manifests allow
nox -s lock -- rich pytest       new releases of these only; everything else stays as it is
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import workspace
from packaging.utils import canonicalize_name

TARGET = workspace.ROOT / "constraints.txt"
HEADER = """\
# Written by `nox -s lock`: the one version of everything that the checks install. Packages themselves declare ranges.
# torch comes first in every environment: "torch>=..." of another package would bring the newest one with CUDA.
"""
BANNED = """\
# Never: its newest release replaces torch by another one with 3 GB of CUDA, and the matching one fails at import.
torchvision<0
"""
# The stub generator's pins are older on purpose and live in proto/pyproject.toml.
GROUPS = ("torch", "test", "peers", "oracles", "lint", "types", "imports", "changelog", "build")


def wanted() -> list[str]:
    """The external requirements of all packages and tools."""
    root = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tree = workspace.packages()
    declared = {
        str(need)
        for package in tree.values()
        for need in package.needs + package.extras + package.test_needs
        if canonicalize_name(need.name) not in tree
    }
    return sorted(declared.union(*(root["dependency-groups"][group] for group in GROUPS)))


def kept(renewed: list[str]) -> str:
    """The current pins, without those to be updated; empty if all are to be updated (`renewed` is empty)."""
    if not renewed:
        return ""
    names = {canonicalize_name(name) for name in renewed}
    lines = TARGET.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if "==" in line and line.split("==")[0] not in names)


def resolve(requirements: list[str], pins: str) -> list[str]:
    """The pins, sorted by name, of what pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text(pins + "\n" + BANNED, encoding="utf-8")
        options = ["-qq", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(constraints)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in items}
    # "2.13.0+cpu" names one build; the pin allows any build of that version.
    return [f"{name}=={version.split('+')[0]}" for name, version in sorted(found.items())]


def main() -> None:
    """Resolve the requirements and write constraints.txt."""
    pins = resolve(wanted(), kept(sys.argv[1:]))
    TARGET.write_text(HEADER + "\n".join(pins) + "\n" + BANNED, encoding="utf-8")


if __name__ == "__main__":
    main()
