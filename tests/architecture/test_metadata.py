"""Every package says on an index what it is: licence, authors, classifiers, addresses; links of its README work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import metadata
import pytest
import workspace

TREE = workspace.packages()
LINK = re.compile(r"\]\(([^)\s]+)\)")


def project(name: str) -> dict[str, Any]:
    """The table `project` of a package's manifest."""
    table: dict[str, Any] = tomllib.loads((TREE[name].folder / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def dead(readme: str) -> list[str]:
    """Links that lead nowhere on an index: relative ones, and those into this tree to what is not there."""
    here = f"{metadata.settings()['repository']}/"
    found = []
    for link in LINK.findall(readme):
        place = link.removeprefix(here).partition("#")[0].split("/", 2)[-1]
        if not link.startswith("https://") or (link.startswith(here) and not (workspace.ROOT / place).exists()):
            found.append(link)
    return found


def test_the_manifests_agree_on_what_they_share() -> None:
    stale = [str(path.relative_to(workspace.ROOT)) for path, _ in metadata.stale()]
    assert not stale, f"run python tools/metadata.py: {stale}"


@pytest.mark.parametrize("name", TREE)
def test_a_manifest_has_what_an_index_shows(name: str) -> None:
    said = project(name)
    assert said["license"] == "Apache-2.0"
    assert said["license-files"] == ["LICENSE"]
    assert said["readme"] == "README.md"
    assert [author["name"] for author in said["authors"]] == [SETTINGS["author"]]
    assert {"Homepage", "Source", "Documentation", "Issues", "Changelog"} <= set(said["urls"])
    assert "Typing :: Typed" in said["classifiers"]
    assert not [line for line in said["classifiers"] if line.startswith("License ::")], "`license` says it already"


@pytest.mark.parametrize("name", TREE)
def test_one_range_of_torch_is_declared(name: str) -> None:
    needs = [need for need in (*TREE[name].needs, *TREE[name].extras) if need.name == "torch"]
    assert {str(need) for need in needs} <= {metadata.settings()["torch"]}


@pytest.mark.parametrize("name", TREE)
def test_the_links_of_a_readme_work_on_an_index(name: str) -> None:
    assert not dead((TREE[name].folder / "README.md").read_text("utf-8"))


def test_a_dead_link_is_found() -> None:
    here = metadata.settings()["repository"]
    links = ["../x.md", f"{here}/blob/main/no.md", f"{here}/blob/main/README.md#top", "https://arxiv.org"]
    assert dead(" ".join(f"[x]({link})" for link in links)) == links[:2]


def test_a_manifest_that_strays_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = TREE["attn-core"]
    text = (package.folder / "pyproject.toml").read_text("utf-8")
    copy = tmp_path / package.folder.relative_to(workspace.ROOT)
    copy.mkdir(parents=True)
    (copy / "pyproject.toml").write_text(text.replace("Homepage", "Home") + '# "torch>=2.0",\n', encoding="utf-8")
    monkeypatch.setattr(workspace, "ROOT", tmp_path)
    monkeypatch.setattr(metadata, "settings", lambda: SETTINGS)
    strayed = workspace.packages()["attn-core"]
    mended = metadata.manifest(strayed)
    assert mended == text + f'# "{SETTINGS["torch"]}",\n'


SETTINGS = metadata.settings()
