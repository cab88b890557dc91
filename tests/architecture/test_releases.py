"""Versions, ranges, changelogs, fragments and the record of releases agree, and no public name changes unsaid."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path

import public_api
import pytest
import releases
import workspace
from packaging.requirements import Requirement

TREE = workspace.packages()
SETTINGS = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
NAME = re.compile(rf"\+[a-z0-9-]+\.({'|'.join(KINDS)})(\.\d+)?\.md")


def misplaced(names: list[str]) -> list[str]:
    """The paths, relative to changelog.d, that no release would find."""
    places = [name.partition("/") for name in names if name != "README.md"]
    return ["/".join(p) for *p, n in places if p[0] not in TREE or not NAME.fullmatch(n)]


def strays(needs: list[Requirement], tree: dict[str, workspace.Package]) -> list[str]:
    """Requirements on packages of ours that refuse this tree's version, or admit one that breaks."""
    ours = [(need, tree[need.name].version) for need in needs if need.name in tree]
    return [
        str(need)
        for need, version in ours
        if version not in need.specifier or releases.following(version, ["breaking"]) in need.specifier
    ]


def test_every_fragment_belongs_to_a_package_and_has_a_known_kind() -> None:
    found = [path.relative_to(releases.FRAGMENTS).as_posix() for path in releases.FRAGMENTS.rglob("*.*")]
    assert not misplaced(found)


@pytest.mark.parametrize(
    "name", ["attn-core/+a.bugfix.md", "attn-nothing/+a.fix.md", "+a.fix.md", "attn-core/x.fix.md"]
)
def test_a_misplaced_fragment_is_found(name: str) -> None:
    assert misplaced([name, "attn-core/+other.fix.md", "attn-core/+named.feature.1.md"])


@pytest.mark.parametrize("name", TREE)
def test_manifest_changelog_and_record_name_one_last_version(name: str) -> None:
    package = TREE[name]
    assert next(iter(releases.entries(package))) == package.version
    assert list(releases.released()[name])[-1] == package.version


@pytest.mark.parametrize("name", TREE)
def test_packages_need_each_other_in_the_versions_of_this_tree(name: str) -> None:
    package = TREE[name]
    assert not strays([*package.needs, *package.extras], TREE)


def test_the_chart_installs_the_image_of_this_server() -> None:
    versions = re.findall(r'^(?:version|appVersion): "(.*)"$', releases.CHART.read_text("utf-8"), re.MULTILINE)
    assert versions == [TREE[releases.SERVER].version] * 2


@pytest.mark.parametrize("name", TREE)
def test_public_names_change_with_a_fragment_and_disappear_with_a_breaking_one(name: str) -> None:
    assert not releases.unsaid(TREE[name])


@pytest.mark.parametrize(
    ("text", "kind", "complaint"),
    [
        ("def f(a): pass\ndef g(): pass\n", None, ""),
        ("def f(a, b=1): pass\ndef g(): pass\n", None, "no fragment says why"),
        ("def f(a, b=1): pass\ndef g(): pass\n", "feature", ""),
        ("def f(a): pass\n", "feature", "no fragment `breaking` for planted.g"),
        ("def f(a): pass\n", "breaking", ""),
    ],
)
def test_a_change_that_no_fragment_says_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: str | None, complaint: str
) -> None:
    package = planted(tmp_path, "def f(a): pass\ndef g(): pass\n")
    surface = public_api.surface(package)
    hashed = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"], input=surface, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert releases.names_hash(surface) == hashed.stdout.strip()
    monkeypatch.setattr(releases, "released", lambda: {"planted": {"0.1.0": {"names": hashed.stdout.strip()}}})
    monkeypatch.setattr(releases, "FRAGMENTS", tmp_path / "changelog.d")
    monkeypatch.setattr(workspace, "ROOT", tmp_path)
    (tmp_path / "src" / "planted.py").write_text(text)
    if kind:
        (tmp_path / "changelog.d" / "planted").mkdir(parents=True)
        (tmp_path / "changelog.d" / "planted" / f"+words.{kind}.md").write_text("Words.")
    found = releases.unsaid(package)
    assert complaint in found if complaint else not found


def planted(folder: Path, text: str) -> workspace.Package:
    """A package of one module, in a repository of its own."""
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "src").mkdir()
    (folder / "src" / "planted.py").write_text(text)
    return workspace.Package(
        name="planted", folder=folder, version="0.1.0", imports=("planted",), needs=(), extras=(), test_needs=()
    )


@pytest.mark.parametrize(
    ("version", "changes", "after", "needed"),
    [
        ("0.1.0", ["breaking", "fix"], "0.2.0", ">=0.2,<0.3"),
        ("0.1.0", ["feature"], "0.1.1", ">=0.1.1,<0.2"),
        ("0.9.3", ["breaking"], "0.10.0", ">=0.10,<0.11"),
        ("1.4.2", ["breaking"], "2.0.0", ">=2.0,<3"),
        ("1.4.2", ["feature"], "1.5.0", ">=1.5,<2"),
        ("1.4.2", ["docs"], "1.4.3", ">=1.4.3,<2"),
    ],
)
def test_a_version_rises_by_what_changed(version: str, changes: list[str], after: str, needed: str) -> None:
    assert releases.following(version, changes) == after
    assert releases.range_from(after) == needed


def test_a_package_is_released_with_one_that_its_range_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "kinds", lambda package: {"breaking"} if package.name == "attn-cache" else set())
    found = releases.next_versions(TREE)
    engine = TREE["attn-engine"].version
    asking = [name for name, one in TREE.items() if "attn-cache" in {need.name for need in (*one.needs, *one.extras)}]
    assert "attn-engine" in asking
    changes = {"attn-cache": ["breaking"]} | {name: [] for name in asking}
    assert found == {name: releases.following(TREE[name].version, kinds) for name, kinds in changes.items()}
    raised = {name: dataclasses.replace(one, version=found.get(name, one.version)) for name, one in TREE.items()}
    assert strays(list(TREE["attn-engine"].needs), raised)
    text = (TREE["attn-engine"].folder / "pyproject.toml").read_text("utf-8")
    needs = tomllib.loads(releases.manifest(text, engine, {name: one.version for name, one in raised.items()}))
    assert not strays([Requirement(need) for need in needs["project"]["dependencies"]], raised)


def test_a_clone_without_tags_has_what_was_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = planted(tmp_path / "origin", "released = True\n")
    (package.folder / "packages" / "attn-core").mkdir(parents=True)
    (package.folder / "packages" / "attn-core" / "core.py").write_text("as released")
    core = dataclasses.replace(package, name="attn-core")
    monkeypatch.setattr(workspace, "ROOT", package.folder)
    monkeypatch.setattr(workspace, "packages", lambda: {"attn-core": core})
    monkeypatch.setattr(releases, "FRAGMENTS", package.folder / "changelog.d")
    monkeypatch.setattr(releases, "RECORD", package.folder / "releases.toml")
    releases.RECORD.write_text('# Why.\n\n[attn-core."0.1.0"]\nnames = "1"\n')
    with pytest.raises(RuntimeError, match="commit first"):
        releases.tag()
    user = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["add", "-A"], [*user, "commit", "-qm", "Release"]):
        subprocess.run(["git", *command], cwd=package.folder, check=True)
    for variable in ("GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(variable, "a@example.org")
    assert releases.tag() == ["attn-core-v0.1.0"]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-tags", package.folder, clone], check=True)
    monkeypatch.setattr(workspace, "ROOT", clone)
    newer = dataclasses.replace(core, version="0.1.7")
    plugin = dataclasses.replace(package, needs=(Requirement("attn-core>=0.1,<0.2"),))
    version, commit = releases.oldest(plugin, newer)
    assert version == "0.1.0"
    assert commit is not None
    assert (releases.unpack(commit, tmp_path / "old") / "core.py").read_text() == "as released"
    assert releases.oldest(dataclasses.replace(package, needs=(Requirement("attn-core>=0.1.5"),)), newer)[1] is None
    with pytest.raises(LookupError, match="neither"):
        releases.oldest(dataclasses.replace(package, needs=(Requirement("attn-core>=3"),)), newer)
