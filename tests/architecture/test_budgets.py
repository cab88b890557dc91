"""No package's tests take more processor time than its budget, nor a worker more memory, by the last recorded run."""

from __future__ import annotations

import durations
import pytest


def test_no_package_is_over_its_budget() -> None:
    record = durations.kept()
    if not record["files"]:
        pytest.skip("no run is recorded in .ci/durations.json: python tools/durations.py out/durations.json")
    assert not durations.over_budget(record)


def test_what_is_over_is_named() -> None:
    record = {"files": {"tests/docs/test_a.py": 6000.0}, "collected": {"packages/attn-cache": 60.0, "tests": 4.0}}
    package, collected, worker = durations.over_budget(record | {"collection_seconds": 0.0, "worker_gb": 9.0})
    assert package.startswith("tests: 100.0 minutes")
    assert collected.startswith("packages/attn-cache: 60.0 s to collect")
    assert worker.startswith("worker_gb: 9.0")
