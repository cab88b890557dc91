"""The tree and its flows stay below the ceiling that ceiling.toml records."""

from __future__ import annotations

from pathlib import Path

import ceiling
import flows
import pytest

LIMITS = ceiling.allowed()
UPDATE = "if it is worth that: python tools/ceiling.py --write, and say in the commit what it buys"


def test_the_tree_is_below_its_ceiling() -> None:
    assert not ceiling.over(ceiling.weight(), LIMITS["weight"]), UPDATE


@pytest.mark.parametrize("name", flows.WARM)
def test_a_flow_is_below_its_ceiling(name: str, tmp_path: Path) -> None:
    found = ceiling.flow(name, tmp_path)
    assert found["files"] > 0
    assert not ceiling.over(found, LIMITS[f"flows.{name}"]), UPDATE


def test_lines_that_compute_are_counted() -> None:
    text = '"""Doc\n\nmore."""\n\nimport a\n\n# why\nx = (\n1,\n)  # end\n\ndef f():\n    """Doc."""\n    return x\n'
    assert ceiling.code_lines(text) == 5


@pytest.mark.parametrize("counted", [0, 49, 50, 51, 99, 100, 149, 150, 71_890])
def test_a_limit_has_room_for_a_small_change_and_not_for_a_large_one(counted: int) -> None:
    room = ceiling.limit("source-lines", counted) - counted
    assert 50 <= room < 150
    assert ceiling.limit("packages", counted) == counted


def test_what_is_over_is_named_and_written() -> None:
    record = "# Why.\n\n[weight]\npackages = 1\nsource-lines = 100 # all\n\n[flows.layer]\nfiles = 2\n"
    assert ceiling.over({"packages": 2, "source-lines": 90}, {"packages": 1, "source-lines": 100}) == {
        "packages": (2, 1)
    }
    mended = ceiling.written(record, "weight", {"packages": 2, "source-lines": 120})
    assert mended == record.replace("packages = 1", "packages = 2").replace("100 # all", "200 # all")
    assert "files = 3" in ceiling.written(mended, "flows.layer", {"files": 3})
