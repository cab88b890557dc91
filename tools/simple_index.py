"""Writes a simple index (PEP 503) of the archives in a folder: static files that pip reads from disk or any web server.

python tools/simple_index.py dist dist/simple
"""

from __future__ import annotations

import hashlib
import html
import shutil
import sys
from collections import defaultdict
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

PAGE = "<!DOCTYPE html>\n<html><body>\n{}\n</body></html>\n"


def project_of(archive: Path) -> str:
    """The normalized project name of a wheel or source archive; raises `ValueError` for other names."""
    parse = parse_wheel_filename if archive.suffix == ".whl" else parse_sdist_filename
    return canonicalize_name(parse(archive.name)[0])


def write_index(archives: list[Path], target: Path) -> list[str]:
    """Write the index of these archives to `target`, which is replaced, with a copy of each; returns the projects."""
    shutil.rmtree(target, ignore_errors=True)
    projects: dict[str, list[Path]] = defaultdict(list)
    for archive in archives:
        projects[project_of(archive)].append(archive)
    for project, files in projects.items():
        folder = target / project
        folder.mkdir(parents=True)
        links = [link(Path(shutil.copy(file, folder))) for file in sorted(files)]
        (folder / "index.html").write_text(PAGE.format("\n".join(links)), encoding="utf-8")
    names = sorted(projects)
    root = "\n".join(f'<a href="{name}/">{name}</a><br>' for name in names)
    (target / "index.html").write_text(PAGE.format(root), encoding="utf-8")
    return names


def link(file: Path) -> str:
    """The line of an archive, with its hash, which pip verifies."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return f'<a href="{html.escape(file.name)}#sha256={digest}">{html.escape(file.name)}</a><br>'


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = sorted([*source.glob("*.whl"), *source.glob("*.tar.gz")])
    print(f"{len(write_index(found, target))} projects in {target}")
