"""The packages of this repository, read from their manifests; all checks use this list."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("packages", "proto", "services", "plugins")
TEST_GROUP = "test"
PYTHONS = ["3.11", "3.12", "3.13"]
"""The Python versions on which packages without torch are tested; the others are tested on the first one."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package: a folder from which one wheel is built.

    `imports` are its import names (`attn_core`; `attn.v1` for the wire format), `needs` its run-time requirements,
    `extras` those of its optional features, `test_needs` its dependency group `test`: what its tests need in addition
    to the test runner.
    """

    name: str
    folder: Path
    version: str
    imports: tuple[str, ...]
    needs: tuple[Requirement, ...]
    extras: tuple[Requirement, ...]
    test_needs: tuple[Requirement, ...]

    @property
    def source(self) -> Path:
        """The source folder that contains the import packages."""
        return self.folder / "src"

    @property
    def tests(self) -> Path:
        """The folder of the package's tests; it may not exist."""
        return self.folder / "tests"

    @property
    def is_plugin(self) -> bool:
        """Whether the package is a plugin, written like a third-party one against the contract only."""
        return self.folder.parent.name == "plugins"


def packages() -> dict[str, Package]:
    """Every package of the tree by distribution name, sorted by name."""
    return dict(_packages(ROOT))


@cache
def _packages(root: Path) -> dict[str, Package]:
    found = [_read(manifest) for place in PLACES for manifest in _manifests(root / place)]
    return {package.name: package for package in sorted(found, key=lambda package: package.name)}


def closure(names: set[str], tree: dict[str, Package]) -> set[str]:
    """The packages of this tree that installing `names` installs, `names` included."""
    reached: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= local_names(tree[name].needs, tree) - reached
    return reached


def local_names(requirements: tuple[Requirement, ...], tree: dict[str, Package]) -> set[str]:
    """The distribution names of those requirements that are packages of this tree."""
    named: set[str] = {canonicalize_name(requirement.name) for requirement in requirements}
    return named & set(tree)


def tested_with(name: str, tree: dict[str, Package]) -> set[str]:
    """The package `name` and the packages of this tree that its tests need."""
    return {name} | local_names(tree[name].test_needs, tree)


def needs_torch(names: set[str], tree: dict[str, Package]) -> bool:
    """Whether the packages, or those of the tree that they need, require torch, which is large and has few wheels."""
    return needs("torch", names, tree)


def needs(distribution: str, names: set[str], tree: dict[str, Package]) -> bool:
    """Whether the packages, or those of the tree that they need, require a distribution."""
    return any(need.name == distribution for name in closure(names, tree) for need in tree[name].needs)


def tested_needing(*distributions: str, name: str, tree: dict[str, Package]) -> bool:
    """Whether a package, or one of the tree that its tests need, requires one of these distributions."""
    return any(needs(one, tested_with(name, tree), tree) for one in distributions)


def alone_on(name: str, tree: dict[str, Package]) -> dict[str, bool]:
    """The Pythons on which a package is tested by itself, and whether that takes no torch and is done at every change.

    That is the first; and all, for those tested with Ray, of which the newest alone is done at every change.
    """
    heavy, ray = (tested_needing(what, name=name, tree=tree) for what in ("torch", "ray"))
    pythons = PYTHONS if ray and not heavy else PYTHONS[:1]
    return {python: not heavy and (not ray or python == PYTHONS[-1]) for python in pythons}


def _manifests(place: Path) -> list[Path]:
    """The manifests at a place, which is a package itself (proto/) or a folder of packages (packages/)."""
    return sorted([*place.glob("pyproject.toml"), *place.glob("*/pyproject.toml")])


def _read(manifest: Path) -> Package:
    table = tomllib.loads(manifest.read_text(encoding="utf-8"))
    project: dict[str, Any] = table["project"]
    extras = [entry for extra in project.get("optional-dependencies", {}).values() for entry in extra]
    group = [entry for entry in table.get("dependency-groups", {}).get(TEST_GROUP, []) if isinstance(entry, str)]
    return Package(
        name=canonicalize_name(project["name"]),
        folder=manifest.parent,
        version=project["version"],
        imports=_import_names(manifest.parent / "src"),
        needs=tuple(map(Requirement, project.get("dependencies", []))),
        extras=tuple(map(Requirement, extras)),
        test_needs=tuple(map(Requirement, group)),
    )


def _import_names(source: Path) -> tuple[str, ...]:
    """The import names below a src folder: the topmost regular packages and the single modules."""
    inits = [path.parent for path in source.rglob("__init__.py") if not (path.parents[1] / "__init__.py").exists()]
    modules = [path.with_suffix("") for path in source.glob("*.py")]
    return tuple(sorted(".".join(path.relative_to(source).parts) for path in inits + modules))
