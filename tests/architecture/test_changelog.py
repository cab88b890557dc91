"""Fragments of the changelog lie where the release of a package looks for them."""

from __future__ import annotations

import re
import tomllib

import pytest
import workspace

FOLDER = workspace.ROOT / "changelog.d"
SETTINGS = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
# 12.feature.md names an issue; +word.feature.md has none.
NAME = re.compile(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(KINDS)})(\.\d+)?\.md")


def misplaced(names: list[str]) -> list[str]:
    """The paths, relative to changelog.d, that no release would find."""
    places = [name.partition("/") for name in names if name != "README.md"]
    return ["/".join(p) for *p, n in places if p[0] not in workspace.packages() or not NAME.fullmatch(n)]


def test_every_fragment_belongs_to_a_package_and_has_a_known_kind() -> None:
    found = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()]
    assert not misplaced(found)


@pytest.mark.parametrize(
    "name", ["attn-core/12.bugfix.md", "attn-nothing/12.fix.md", "12.fix.md", "attn-core/x.fix.md"]
)
def test_a_misplaced_fragment_is_found(name: str) -> None:
    assert misplaced([name, "attn-core/12.fix.md", "attn-core/+named.feature.1.md"])
