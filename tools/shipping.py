"""What a release has beside the wheels: source archives, hashes, and what README promises of its install sets."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import workspace

SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class InstallSet:
    """A line of README that installs packages: their names, and the subcommands of `attn` that end its comment."""

    packages: tuple[str, ...]
    commands: tuple[str, ...]

    @property
    def label(self) -> str:
        """The packages as one word."""
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
    """The file of SHA-256 hashes of all archives in a folder, as `sha256sum --check` reads it."""
    archives = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz"), *folder.glob("*.json")])
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in archives]
    target = folder / SUMS
    target.write_text("".join(lines), encoding="utf-8")
    return target
