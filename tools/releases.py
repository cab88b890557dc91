"""The releases of the packages: next versions from the fragments of changelog.d, and what was released before.

    python tools/releases.py           give every package with fragments its next version and CHANGELOG.md, for a commit
    python tools/releases.py --draft   print the entries instead
    python tools/releases.py --tag     tag the commit with the versions that have no commit in releases.toml yet

releases.toml has for every released version the names of its public API, as the Git hash of the record in
tests/public_api, and the commit from which it was built: a clone without tags can build it again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import public_api
import workspace
from packaging.version import Version

CORE, SERVER = "attn-core", "attn-serve"
RECORD = workspace.ROOT / "releases.toml"
CHART = workspace.ROOT / "deploy" / "helm" / "attn" / "Chart.yaml"
FRAGMENTS = workspace.ROOT / "changelog.d"
NEWEST_FIRST = "<!-- newest first -->\n"
Releases = dict[str, dict[str, dict[str, str]]]


def released() -> Releases:
    """Of every package each released version, oldest first, with its `names` and, once tagged, its `commit`."""
    return {package: dict(versions) for package, versions in tomllib.loads(RECORD.read_text("utf-8")).items()}


def write(releases: Releases) -> None:
    """Write releases.toml, below the comment with which it begins."""
    head = re.match(r"(?:#.*\n)*", RECORD.read_text("utf-8"))
    tables = [
        f'[{package}."{version}"]\n' + "".join(f'{key} = "{value}"\n' for key, value in facts.items())
        for package, versions in sorted(releases.items())
        for version, facts in versions.items()
    ]
    RECORD.write_text("\n".join([head[0] if head else "", *tables]), encoding="utf-8")


def kinds(package: workspace.Package) -> set[str]:
    """The kinds of a package's fragments, such as `breaking` and `fix`."""
    return {path.name.split(".")[1] for path in (FRAGMENTS / package.name).glob("*.md")}


def following(version: str, changes: Iterable[str]) -> str:
    """The version after `version` with changes of these kinds; below 1.0 the second number rises where others break."""
    major, minor, micro = Version(version).release
    if "breaking" in changes:
        return f"{major + 1}.0.0" if major else f"0.{minor + 1}.0"
    return f"{major}.{minor + 1}.0" if major and "feature" in changes else f"{major}.{minor}.{micro + 1}"


def range_from(version: str) -> str:
    """The range that a package asks for with which it was tested: 0.2.0 is `>=0.2,<0.3`, and 0.1.1 `>=0.1.1,<0.2`."""
    end = ".".join(following(version, ["breaking"]).split(".")[: 1 if Version(version).major else 2])
    return f">={version.removesuffix('.0')},<{end}"


def next_versions(tree: dict[str, workspace.Package]) -> dict[str, str]:
    """The next version of each package that has fragments, and of those that do not admit what they need any more."""
    versions = {name: following(one.version, found) for name, one in tree.items() if (found := kinds(one))}
    for name, one in tree.items():
        moved = [need for need in (*one.needs, *one.extras) if need.name in versions]
        if name not in versions and not all(need.specifier.contains(versions[need.name]) for need in moved):
            versions[name] = following(one.version, [])
    return versions


def manifest(text: str, version: str, tree_versions: dict[str, str]) -> str:
    """The text of a pyproject.toml with a version of its own, and with ranges that begin at the tree's versions."""
    text = re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    return re.sub(
        r'"(attn-[a-z-]+)[<>=][^";]*(?=[";])',
        lambda need: f'"{need[1]}{range_from(tree_versions[need[1]])}' if need[1] in tree_versions else need[0],
        text,
    )


def towncrier_settings(package: workspace.Package, version: str) -> str:
    """The text of towncrier's configuration file for a package: the root's, with the package's own values."""
    text = (workspace.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.sub(r"\A.*?(?=^\[tool\.towncrier\])", "", text, flags=re.DOTALL | re.MULTILINE)
    own = {
        "name": package.name,
        "version": version,
        "directory": f"changelog.d/{package.name}",
        "filename": changelog(package).relative_to(workspace.ROOT).as_posix(),
    }
    lines = "".join(f'{key} = "{value}"\n' for key, value in own.items())
    return table.replace("[tool.towncrier]\n", f"[tool.towncrier]\n{lines}", 1)


def changelog(package: workspace.Package) -> Path:
    """The package's CHANGELOG.md."""
    return package.folder / "CHANGELOG.md"


def entries(package: workspace.Package) -> dict[str, str]:
    """The entries of a package's CHANGELOG.md by version, newest first, each with its title."""
    text = changelog(package).read_text("utf-8").partition(NEWEST_FIRST)[2]
    return {entry.split()[1]: entry.strip() for entry in re.split(r"^(?=## \d)", text, flags=re.MULTILINE)[1:]}


def towncrier(package: workspace.Package, version: str, *options: str) -> None:
    """Turn a package's fragments into an entry of its CHANGELOG.md, or print it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "towncrier.toml"
        settings.write_text(towncrier_settings(package, version), encoding="utf-8")
        command = [sys.executable, "-m", "towncrier", "build", *options, "--config", str(settings)]
        subprocess.run([*command, "--dir", str(workspace.ROOT)], check=True)


def names_hash(surface: str) -> str:
    """Git's hash of a record of public names: in a clone with its history, `git cat-file blob` prints the record."""
    data = surface.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def released_names(package: workspace.Package) -> set[str] | None:
    """The public names of a package's last release, without parameters; None in a clone without that history."""
    names = released()[package.name][package.version]["names"]
    command = ["git", "cat-file", "blob", names]
    found = subprocess.run(command, cwd=workspace.ROOT, capture_output=True, text=True, check=False)
    return bare(found.stdout) if found.returncode == 0 else None


def bare(surface: str) -> set[str]:
    """The names in a record of public names, without their parameters."""
    return {line.partition("(")[0] for line in surface.splitlines() if not line.startswith("#")}


def unsaid(package: workspace.Package) -> str:
    """What a package's fragments do not say of its public names since its last release; empty if nothing."""
    surface, said = public_api.surface(package), kinds(package)
    if names_hash(surface) == released()[package.name][package.version]["names"] or "breaking" in said:
        return ""
    if gone := sorted((released_names(package) or set()) - bare(surface)):
        return f"{package.name} has no fragment `breaking` for {', '.join(gone)}"
    return "" if said else f"the public names of {package.name} changed, and no fragment says why"


def release(tree: dict[str, workspace.Package]) -> dict[str, str]:
    """Write the next versions into manifests, changelogs, the chart and releases.toml; returns them."""
    versions, record = next_versions(tree), released()
    of_tree = {name: versions.get(name, one.version) for name, one in tree.items()}
    for name, version in versions.items():
        package = tree[name]
        path = package.folder / "pyproject.toml"
        path.write_text(manifest(path.read_text("utf-8"), version, of_tree), encoding="utf-8")
        if not changelog(package).exists():
            changelog(package).write_text(f"# Changes of {name}\n\n{NEWEST_FIRST}", encoding="utf-8")
        if not kinds(package):
            reason = FRAGMENTS / name / "+ranges.fix.md"
            reason.parent.mkdir(exist_ok=True)
            reason.write_text("Works with the new versions of the packages that it needs.\n", encoding="utf-8")
        towncrier(package, version, "--yes")
        record.setdefault(name, {})[version] = {"names": names_hash(public_api.surface(package))}
    write(record)
    chart = re.sub(r"(?m)^(version: |appVersion: )[^\n]*", rf'\1"{of_tree[SERVER]}"', CHART.read_text("utf-8"))
    CHART.write_text(chart, encoding="utf-8")
    return versions


def tag() -> list[str]:
    """Tag the commit with the version of every package that has no tag yet, and note the commit in releases.toml.

    Raises `RuntimeError` if fragments are left or the work tree is not as committed: the tag would name something else.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=workspace.ROOT, check=True, capture_output=True, text=True).stdout.strip()

    tree, record, tags = workspace.packages(), released(), []
    if left := [name for name, package in tree.items() if kinds(package)]:
        raise RuntimeError(f"python tools/releases.py first: changelog.d has fragments of {', '.join(left)}")
    if changed := git("status", "--porcelain"):
        raise RuntimeError(f"commit first, the work tree has changes:\n{changed}")
    commit = git("rev-parse", "HEAD")
    for name, package in tree.items():
        facts = record[name][package.version]
        if "commit" not in facts:
            tags.append(f"{name}-v{package.version}")
            git("tag", "-a", tags[-1], "-m", f"{name} {package.version}", commit)
            facts["commit"] = commit
    write(record)
    return tags


def oldest(plugin: workspace.Package, core: workspace.Package) -> tuple[str, str | None]:
    """The oldest version of attn-core that a plugin allows, and its commit, or None if it is this tree's version.

    Raises `LookupError` if neither a release nor this tree has an allowed version.
    """
    (need,) = (need for need in plugin.needs if need.name == CORE)
    commits = {version: facts["commit"] for version, facts in released().get(CORE, {}).items() if "commit" in facts}
    admitted = sorted(need.specifier.filter({*commits, core.version}), key=Version)
    if not admitted:
        raise LookupError(f"{plugin.name} asks for {need}, but neither releases.toml nor this tree has such a core")
    return admitted[0], commits.get(admitted[0])


def unpack(commit: str, target: Path) -> Path:
    """Extract attn-core as of a commit into `target`, which is emptied first; returns the package's folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    archive = target / "core.tar"
    command = ["git", "archive", "-o", str(archive), commit, f"packages/{CORE}"]
    subprocess.run(command, cwd=workspace.ROOT, check=True)
    shutil.unpack_archive(archive, target)
    return target / "packages" / CORE


def main() -> None:
    """Release, print what would be released, or tag."""
    tree = workspace.packages()
    if "--tag" in sys.argv:
        print("\n".join(tag()))
    elif "--draft" in sys.argv:
        for name, version in next_versions(tree).items():
            if kinds(tree[name]):
                print(f"\n# {name}\n", flush=True)
                towncrier(tree[name], version, "--draft")
    else:
        for name, version in release(tree).items():
            print(f"{name:24}{tree[name].version} -> {version}")


if __name__ == "__main__":
    main()
