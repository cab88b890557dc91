"""The processor time of the tests: recorded by pytest, kept in .ci/durations.json, compared with .ci/budgets.toml.

    pytest --record-durations FILE     record what a run costs
    python tools/durations.py          print the minutes of each package, and its budget
    python tools/durations.py FILE     keep the record FILE first; files that it does not have stay as they are

A record has the seconds of each test file: of its tests, fixtures, and the programs that they ran and awaited. It also
has the seconds of collecting each package and all, and the gigabytes of memory, of the worker that needed most.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tomllib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import warm

CI = Path(__file__).resolve().parents[1] / ".ci"
RECORD, BUDGETS = CI / "durations.json", CI / "budgets.toml"


def processor_time() -> float:
    """The processor time, in seconds, of this process, of its child processes that have ended, and of warm ones."""
    return sum(os.times()[:4]) + warm.WARM.spent


def kept() -> dict[str, Any]:
    """The record of the whole suite; an empty one if there is none."""
    empty = {"files": {}, "collected": {}, "collection_seconds": 0.0, "worker_gb": 0.0}
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else empty


def package_of(file: str) -> str:
    """The folder of the package to which a test file belongs; all plugins together count as one."""
    first, second = file.split("/")[:2]
    return first if first in {"plugins", "proto", "tests"} else f"{first}/{second}"


def minutes(record: dict[str, Any]) -> dict[str, float]:
    """The minutes of processor time of each package."""
    found: defaultdict[str, float] = defaultdict(float)
    for file, seconds in record["files"].items():
        found[package_of(file)] += seconds / 60
    return dict(found)


def over_budget(record: dict[str, Any]) -> list[str]:
    """A line for each package whose tests take longer than its budget, and for what a worker may need."""
    budgets = tomllib.loads(BUDGETS.read_text("utf-8"))
    allowed, worker = budgets["minutes"], budgets["worker"]
    lines = [
        f"{package}: {spent:.1f} minutes of processor time, its budget is {allowed.get(package, allowed['others'])}"
        for package, spent in sorted(minutes(record).items())
        if spent > allowed.get(package, allowed["others"])
    ]
    longest = worker["package_seconds"]
    lines += [
        f"{package}: {spent} s to collect, allowed {longest}"
        for package, spent in record["collected"].items()
        if spent > longest
    ]
    return lines + [
        f"{name}: {record[name]}, allowed {worker[name]}"
        for name in ("collection_seconds", "worker_gb")
        if record[name] > worker[name]
    ]


class Recorder:
    """Plugin that sums the processor time of every test file and writes the record when the run ends."""

    def __init__(self, target: Path | None) -> None:
        self.target = target
        self.last = 0.0
        self.files: defaultdict[str, float] = defaultdict(float)
        self.collected: defaultdict[str, float] = defaultdict(float)
        self.collection, self.memory = 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """Add the time of collecting a file, a class or a folder to that of its package."""
        began = processor_time()
        report: Any = yield
        if collector.nodeid.count("/"):
            self.collected[package_of(collector.nodeid.partition("::")[0])] += processor_time() - began
        return report

    def pytest_collection_finish(self) -> None:
        """Note what the start of this process and collecting took."""
        self.collection = max(self.collection, processor_time())

    def pytest_runtest_logstart(self) -> None:
        """Start counting; with pytest-xdist each process hears of its own tests."""
        self.last = processor_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Attach to the report of a phase the time that it took; pytest-xdist hands it on."""
        report: Any = yield
        now = processor_time()
        report.processor_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the time of a phase to that of its file."""
        self.files[report.nodeid.partition("::")[0]] += getattr(report, "processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker needed."""
        spent = getattr(node, "workeroutput", {})
        self.collection = max(self.collection, spent.get("collection", 0.0))
        self.memory = max(self.memory, spent.get("memory", 0.0))
        for package, seconds in spent.get("collected", {}).items():
            self.collected[package] = max(self.collected[package], seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand what this worker needed to the process that started it, or write the record."""
        self.memory = max(self.memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2)
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output.update(collection=self.collection, memory=self.memory, collected=dict(self.collected))
        elif self.target is not None:
            record = {"collection_seconds": round(self.collection, 1), "worker_gb": round(self.memory, 2)}
            collected = {package: round(seconds, 1) for package, seconds in sorted(self.collected.items())}
            write(self.target, record | {"collected": collected, "files": dict(self.files)})


class LongestFirst:
    """Plugin that orders the test files by their recorded time: a long one at the end would keep one worker alone."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort files; unknown ones come first, and the tests of a file stay in order."""
        known = kept()["files"]
        items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], float("inf")))


def write(target: Path, record: dict[str, Any]) -> None:
    """Write a record with the files in order, to a tenth of a second."""
    record["files"] = {file: round(seconds, 1) for file, seconds in sorted(record["files"].items())}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Keep the given record, if any, and print the table."""
    if sys.argv[1:]:
        new, record = json.loads(Path(sys.argv[1]).read_text("utf-8")), kept()
        there = {file: spent for file, spent in record["files"].items() if (CI.parent / file).exists()}
        write(RECORD, new | {"files": there | new["files"]})
    record = kept()
    allowed = tomllib.loads(BUDGETS.read_text("utf-8"))["minutes"]
    for package, spent in sorted(minutes(record).items(), key=lambda found: -found[1]):
        print(f"{package:34}{spent:6.1f} of {allowed.get(package, allowed['others'])} minutes")
    print(f"{'all':34}{sum(minutes(record).values()):6.1f} minutes of processor time")
    print(f"a worker: {record['collection_seconds']} s to collect, {record['worker_gb']} GB")
    print("\n".join(over_budget(record)))


if __name__ == "__main__":
    main()
