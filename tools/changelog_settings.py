"""The settings of towncrier for one package: those of the root, with the package's name, version and files."""

from __future__ import annotations

import re

import workspace


def of(package: workspace.Package) -> str:
    """The text of towncrier's configuration file for a package."""
    text = (workspace.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.sub(r"\A.*?(?=^\[tool\.towncrier\])", "", text, flags=re.DOTALL | re.MULTILINE)
    own = {
        "name": package.name,
        "version": package.version,
        "directory": f"changelog.d/{package.name}",
        "filename": (package.folder / "CHANGELOG.md").relative_to(workspace.ROOT).as_posix(),
    }
    lines = "".join(f'{key} = "{value}"\n' for key, value in own.items())
    return table.replace("[tool.towncrier]\n", f"[tool.towncrier]\n{lines}", 1)
