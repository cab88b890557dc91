"""Each package declares what it imports, and no more of ours than it may know."""

from __future__ import annotations

import configparser
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
import sources
import workspace
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TREE = workspace.packages()
INSTALLED = packages_distributions()
SKIPS = re.compile(r'importorskip\(\s*"([\w.]+)"')
OWNERS = {module: owner for owner, package in TREE.items() for module in package.imports}


def owner_of(module: str) -> set[str]:
    """The distributions that an import can come from; empty for the standard library."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return set()
    ours = {owner for name, owner in OWNERS.items() if module == name or module.startswith(f"{name}.")}
    if ours or top == "attn":
        return ours or {"attn-proto"}
    # google.rpc and google.protobuf share a top name: all its owners are possible.
    return {canonicalize_name(name) for name in INSTALLED.get(top, [top])}


def names(needs: tuple[Requirement, ...]) -> set[str]:
    """The distributions that requirements name."""
    return {canonicalize_name(need.name) for need in needs}


def undeclared(package: workspace.Package) -> list[str]:
    """Imports of a package that none of its declared needs can satisfy.

    Those inside functions may be extras, and so may all of a plugin's modules that are imported inside functions only.
    """
    declared = names(package.needs) | {package.name}
    found, loaded = [], loaded_with_plugin(package)
    for source in sources.below(package.source):
        late = source.late_imports()
        extras = names(package.extras)
        first = set(source.imports()) - late
        found += unmet(source, first, declared if loaded is None or source.path in loaded else declared | extras)
        found += unmet(source, late, declared | extras)
    return found


def loaded_with_plugin(package: workspace.Package) -> set[str] | None:
    """The paths of the files that are loaded with the entry points of a package; None where it has none."""
    project = tomllib.loads((package.folder / "pyproject.toml").read_text("utf-8"))["project"]
    entries = [target for group in project.get("entry-points", {}).values() for target in group.values()]
    if not entries:
        return None
    files = {module_of(source, package): source for source in sources.below(package.source)}
    loaded: set[str] = set()
    waiting = {target.partition(":")[0] for target in entries}
    while waiting:
        module = waiting.pop()
        source = files.get(module)
        if source is None or source.path in loaded:
            continue
        loaded.add(source.path)
        waiting |= {name for _, name in set(source.imports()) - source.late_imports()}
        # A package is loaded with each of its modules.
        waiting.add(module.rpartition(".")[0])
    return loaded


def module_of(source: sources.Source, package: workspace.Package) -> str:
    """The dotted name of a file of a package."""
    inner = (workspace.ROOT / source.path).relative_to(package.source).with_suffix("")
    return ".".join(inner.parts[:-1] if inner.name == "__init__" else inner.parts)


def unmet(source: sources.Source, imports: set[tuple[int, str]], declared: set[str]) -> list[str]:
    """Those of the imports of a file that none of the declared distributions can satisfy."""
    owned = [(line, module, owner_of(module)) for line, module in sorted(imports)]
    return [
        f"{source.path}:{line} imports {module} of {' or '.join(sorted(owners))}"
        for line, module, owners in owned
        if owners and not owners & declared
    ]


@pytest.mark.parametrize("name", TREE)
def test_every_import_is_of_the_standard_library_or_of_a_declared_need(name: str) -> None:
    found = undeclared(TREE[name])
    assert not found, f"{name} does not declare these in its pyproject.toml:\n" + "\n".join(found)


def undeclared_by_tests(package: workspace.Package) -> list[str]:
    """Imports at the top of test modules of what neither the package nor its tests declare, unless they skip without.

    What a need of ours needs is there with it, such as torch.
    """
    groups = tomllib.loads((workspace.ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    shared = tuple(Requirement(text) for text in groups[workspace.TEST_GROUP])
    ours = workspace.closure(workspace.tested_with(package.name, TREE), TREE)
    declared = ours | names(package.test_needs) | names(shared)
    declared |= {name for owner in ours for name in names(TREE[owner].needs)}
    helpers = [*package.tests.rglob("*.py"), *(workspace.ROOT / "tests" / "support").glob("*.py")]
    beside = {name for path in helpers for name in (path.stem, path.parent.name)}
    found = []
    for source in sources.below(package.tests):
        if not source.path.rpartition("/")[2].startswith("test_"):
            continue
        excused = beside | {module.partition(".")[0] for module in SKIPS.findall(source.text)}
        first = set(source.imports()) - source.late_imports()
        asked = {(line, module) for line, module in first if module.partition(".")[0] not in excused}
        found += unmet(source, asked, declared)
    return found


@pytest.mark.parametrize("name", TREE)
def test_what_the_tests_of_a_package_import_is_declared_or_they_skip_without_it(name: str) -> None:
    found = undeclared_by_tests(TREE[name])
    assert not found, f"{name} does not declare these for its tests:\n" + "\n".join(found)


def test_the_contract_needs_pluggy_and_packaging_only() -> None:
    assert {need.name for need in TREE["attn-core"].needs} == {"pluggy", "packaging"}


@pytest.mark.parametrize("name", [name for name, package in TREE.items() if package.is_plugin])
def test_a_plugin_of_ours_needs_no_more_of_ours_than_a_strangers(name: str) -> None:
    # Families of models are built on attn-models, as a stranger's would be.
    assert workspace.local_names(TREE[name].needs, TREE) - {"attn-models", "attn-schema"} == {"attn-core"}


@pytest.mark.parametrize("name", TREE)
def test_a_range_of_one_of_ours_admits_the_version_in_this_tree(name: str) -> None:
    needs = [need for need in TREE[name].needs if need.name in TREE]
    stale = [str(need) for need in needs if Version(TREE[need.name].version) not in need.specifier]
    assert not stale


def test_the_pins_satisfy_every_declared_range() -> None:
    text = (workspace.ROOT / "constraints.txt").read_text("utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line)
    needs = [
        (p.name, need) for p in TREE.values() for need in p.needs + p.extras + p.test_needs if need.name not in TREE
    ]
    missing = [f"{name}: {need}" for name, need in needs if canonicalize_name(need.name) not in pins]
    broken = [f"{name}: {n}" for name, n in needs if not n.specifier.contains(pins.get(canonicalize_name(n.name), "0"))]
    assert not missing, f"not pinned, run nox -s lock: {missing}"
    assert not broken, f"pinned outside the declared range: {broken}"


def test_the_import_contracts_name_every_package_of_the_tree() -> None:
    settings = configparser.ConfigParser()
    settings.read(workspace.ROOT / ".importlinter")
    roots = settings["importlinter"]["root_packages"].split()
    assert sorted(roots) == sorted(OWNERS)
    layers = settings["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    assert sorted(layers) == sorted(OWNERS)


@pytest.mark.parametrize("name", TREE)
def test_a_package_has_what_its_users_look_for(name: str) -> None:
    package = TREE[name]
    expected = [package.folder / "README.md", package.tests]
    expected += [package.source.joinpath(*module.split("."), "py.typed") for module in package.imports]
    missing = [str(path.relative_to(workspace.ROOT)) for path in expected if not path.exists()]
    assert not missing


def test_what_is_loaded_with_a_plugin_is_told_from_what_is_imported_later() -> None:
    package = TREE["attn-kernels-triton"]
    loaded = loaded_with_plugin(package)
    assert loaded is not None
    names_of = {path.partition("/src/")[2] for path in loaded}
    assert {"attn_kernels_triton/__init__.py", "attn_kernels_triton/plugin.py"} <= names_of
    assert "attn_kernels_triton/kernels/attention_forward.py" not in names_of
    assert loaded_with_plugin(TREE["attn-schema"]) is None
