"""The test results recorded for each mechanism: what it was compared with, the largest errors, the laws it passed."""

from __future__ import annotations

import ast
import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import sources
import workspace
from attn_testing.laws import MECHANISM_LAWS

DATA = workspace.ROOT / "docs" / "proof.json"
RECORDERS = {"Agreement", "agrees"}
"""The names by which a test that records results is recognised: the kit's class, or the fixture that makes one."""
LAW_OF = {test: law.title() for law in MECHANISM_LAWS for test in law.checks()}
"""The title of the law that each test of the kit checks."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The largest errors of one test between a mechanism and one oracle; None for what was not compared."""

    mechanism: str
    kind: str
    oracle: str
    test: str
    dtype: str
    outputs: float | None = None
    gradients: float | None = None


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The results of one test class: the laws that passed, and the reasons why others do not apply."""

    mechanism: str
    test: str
    passed: list[str] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """All recorded results, sorted by mechanism and test."""

    comparisons: list[Comparison]
    laws: list[Laws]


def load() -> Proof:
    """Load the records from docs/proof.json."""
    data = json.loads(DATA.read_text("utf-8"))
    return Proof(
        comparisons=[Comparison(**entry) for entry in data["comparisons"]],
        laws=[Laws(**entry) for entry in data["laws"]],
    )


def save(proof: Proof) -> None:
    """Write docs/proof.json with one entry per line, so that diffs show single entries."""
    parts = {name: ",\n".join(map(json.dumps, entries)) for name, entries in asdict(proof).items()}
    text = ",\n".join(f'"{name}": [\n{entries}\n]' for name, entries in parts.items())
    DATA.write_text("{\n" + text + "\n}\n", encoding="utf-8")


def cases(report: Path) -> Iterator[tuple[str, ET.Element]]:
    """The tests of a JUnit report, each with its node id without parameters, `folder/file.py::Class::test`."""
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 -- pytest wrote it on this machine
        *folders, last = case.attrib["classname"].split(".")
        owner = [last] if last[:1].isupper() else []
        path = "/".join(folders if owner else [*folders, last]) + ".py"
        yield "::".join([path, *owner, case.attrib["name"].partition("[")[0]]), case


def properties(case: ET.Element, name: str) -> list[dict[str, Any]]:
    """The values that a test recorded under a property name."""
    found = case.iterfind(f"properties/property[@name='{name}']")
    return [json.loads(entry.attrib["value"]) for entry in found]


def read(report: Path) -> Proof:
    """Read the records of a JUnit report; raises `SystemExit` if a test in it failed."""
    compared: dict[tuple[str, str, str, str, str], dict[str, float]] = defaultdict(dict)
    passed: dict[tuple[str, str], set[str]] = defaultdict(set)
    silent: dict[str, dict[str, str]] = defaultdict(dict)
    for test, case in cases(report):
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{test} failed; only a run without failures is recorded")
        owner, _, name = test.rpartition("::")
        if (skipped := case.find("skipped")) is not None and name in LAW_OF:
            # A skipped test records nothing itself, so the law's reason is taken from the skip message.
            silent[owner].setdefault(LAW_OF[name], skipped.attrib.get("message", ""))
        for found in properties(case, "agrees"):
            errors = compared[found["mechanism"], found["kind"], found["oracle"], test, found["dtype"]]
            errors[found["part"]] = max(errors.get(found["part"], 0.0), rounded(found["error"]))
        for found in properties(case, "law"):
            passed[found["mechanism"], owner].add(found["law"])
    return Proof(
        comparisons=[comparison(*key, errors) for key, errors in compared.items()],
        laws=[law_entry(mechanism, owner, kept, silent[owner]) for (mechanism, owner), kept in passed.items()],
    )


def comparison(mechanism: str, kind: str, oracle: str, test: str, dtype: str, errors: dict[str, float]) -> Comparison:
    """Make the record of one test with one oracle, from the largest errors of all its cases."""
    found = Comparison(mechanism=mechanism, kind=kind, oracle=oracle, test=test, dtype=dtype)
    return replace(found, outputs=errors.get("outputs"), gradients=errors.get("gradients"))


def law_entry(mechanism: str, test: str, passed: set[str], silent: dict[str, str]) -> Laws:
    """Make the record of a test class; a law with at least one passed check is not listed as not applicable."""
    quiet = {law: reason for law, reason in sorted(silent.items()) if law not in passed}
    return Laws(mechanism=mechanism, test=test, passed=sorted(passed), silent=quiet)


def rounded(error: float) -> float:
    """An error rounded to one digit, since further digits differ between machines."""
    return float(f"{error:.0e}")


def merged(old: Proof, new: Proof) -> Proof:
    """The new records, and the old ones of tests that still exist and were not run again."""
    there = recording_tests() | {entry.test for entry in old.laws if exists(entry.test)}
    # A run may have included only some parameters of a test, such as those of one mechanism.
    ran = {(e.mechanism, e.test) for e in new.comparisons} | {(e.mechanism, e.test) for e in new.laws}

    def kept(entries: list[Any], added: list[Any]) -> list[Any]:
        left = [entry for entry in entries if entry.test in there and (entry.mechanism, entry.test) not in ran]
        return sorted([*left, *added], key=lambda entry: (entry.mechanism, entry.test, str(entry)))

    return Proof(comparisons=kept(old.comparisons, new.comparisons), laws=kept(old.laws, new.laws))


def exists(test: str) -> bool:
    """Whether the test class of a node id still exists in its file."""
    path, _, name = test.partition("::")
    file = workspace.ROOT / path
    return file.exists() and f"class {name}(" in file.read_text("utf-8")


def recording_tests() -> set[str]:
    """The node ids of all tests of the tree that record a comparison."""
    return {
        f"{source.path}::{name.replace('.', '::')}"
        for source in sources.of_tests()
        for name, function in source.functions()
        if name.rpartition(".")[2].startswith("test_") and RECORDERS & names_in(function)
    }


def names_in(function: ast.AST) -> set[str]:
    """All names that a function uses, and those of its parameters."""
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return used | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
