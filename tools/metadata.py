"""Writes the common metadata of all package manifests: licence, authors, classifiers, URLs, and the range of torch.

    python tools/metadata.py           write it into every pyproject.toml, and LICENSE beside each
    python tools/metadata.py --check   fail if something differs

The values are those of the table `tool.attn` in the root's pyproject.toml. Links in READMEs are absolute and begin with
its `repository`, because a package's page on an index cannot use paths relative to this tree.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import workspace

LICENCE = workspace.ROOT / "LICENSE"
WRITTEN = [r"^authors = .*\n", r"^license-files = .*\n", r"^classifiers = \[\n(?:    .*\n)*\]\n"]
ADDRESSES = r"^\[project\.urls\]\n(?:.+\n)*\n?"
TORCH = re.compile(r'^(.*)"torch[<>=~!,. 0-9]*"', re.MULTILINE)


def settings() -> dict[str, str]:
    """The table `tool.attn` of the root's pyproject.toml."""
    table: dict[str, str] = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["attn"]
    return table


def classifiers(package: workspace.Package) -> list[str]:
    """The trove classifiers, with the tested Python versions; the licence is given by `license` instead."""
    torch = workspace.needs_torch(workspace.tested_with(package.name, workspace.packages()), workspace.packages())
    return [
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: {version}" for version in (["3.11"] if torch else workspace.PYTHONS)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ]


def addresses(package: workspace.Package) -> dict[str, str]:
    """The URLs of the package's page on an index, by label."""
    repository = settings()["repository"]
    folder = package.folder.relative_to(workspace.ROOT).as_posix()
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Source": f"{repository}/tree/main/{folder}",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/{folder}/CHANGELOG.md",
    }


def manifest(package: workspace.Package) -> str:
    """The text of a package's pyproject.toml with the common metadata brought up to date."""
    text = (package.folder / "pyproject.toml").read_text("utf-8")
    for written in (*WRITTEN, ADDRESSES):
        text = re.sub(written, "", text, flags=re.MULTILINE)
    lines = [f'authors = [{{ name = "{settings()["author"]}" }}]', 'license-files = ["LICENSE"]', "classifiers = ["]
    lines += [f'    "{classifier}",' for classifier in classifiers(package)] + ["]"]
    text = re.sub(
        r"^requires-python = .*\n", lambda found: found[0] + "\n".join(lines) + "\n", text, flags=re.MULTILINE
    )
    table = "\n".join(["[project.urls]", *(f'{name} = "{url}"' for name, url in addresses(package).items()), "\n"])
    text = text.replace("[tool.hatch.build", table + "[tool.hatch.build", 1)
    return TORCH.sub(lambda found: f'{found[1]}"{settings()["torch"]}"', text)


def wanted() -> Iterator[tuple[Path, str]]:
    """Every file that this program writes, with its expected text."""
    for package in workspace.packages().values():
        yield package.folder / "pyproject.toml", manifest(package)
        yield package.folder / LICENCE.name, LICENCE.read_text("utf-8")


def stale() -> list[tuple[Path, str]]:
    """The files that are missing or not up to date, with their expected text."""
    return [(path, text) for path, text in wanted() if not path.exists() or path.read_text("utf-8") != text]


def main() -> int:
    """Write the files, or with --check only list the stale ones; returns the exit status."""
    found = stale()
    for path, text in found:
        print(path.relative_to(workspace.ROOT))
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return 1 if found and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
