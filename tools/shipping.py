"""Helpers for releases: notes, the hashes of archives, and the sets of packages that README's section Install lists."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import releases
import workspace

SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class InstallSet:
    """A line of README that installs packages: their names, and the subcommands of `attn` listed in its comment."""

    packages: tuple[str, ...]
    commands: tuple[str, ...]

    @property
    def label(self) -> str:
        """The names of the packages, joined by "+"."""
        return "+".join(self.packages)


def install_sets() -> list[InstallSet]:
    """The sets of README's section Install, in its order."""
    text = (workspace.ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^pip install ((?:attn-[a-z-]+ ?)+) *#(.*)$", text, re.MULTILINE)
    return [
        InstallSet(tuple(names.split()), tuple(re.findall(r"[a-z]+", comment.partition("attn ")[2])))
        for names, comment in lines
    ]


def write_sums(folder: Path) -> Path:
    """Write the SHA-256 hashes of all archives in a folder, in the format of `sha256sum --check`; returns the path."""
    archives = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz"), *folder.glob("*.json")])
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in archives]
    target = folder / SUMS
    target.write_text("".join(lines), encoding="utf-8")
    return target


def write_notes(folder: Path) -> Path:
    """Write what is new in each package of this tree, from its CHANGELOG.md; returns the path."""
    tree = workspace.packages().values()
    notes = [releases.entries(package)[package.version].replace("## ", f"## {package.name} ", 1) for package in tree]
    target = folder / "NOTES.md"
    target.write_text("# What is new\n\n" + "\n\n".join(notes) + "\n", encoding="utf-8")
    return target
