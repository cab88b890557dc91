"""The chapters of the course run, and show what their code prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import course
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_chapter_runs_and_shows_what_it_prints() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "course.py", "--check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("a 1.00", "a 1.03", True), ("a 1.0", "a 2.0", False), ("a 1.0", "b 1.0", False), ("x", "x 1", False)],
)
def test_outputs_differ_by_more_than_the_last_digits_of_numbers(one: str, other: str, expected: bool) -> None:
    assert course.same(one, other) is expected


def test_every_picture_of_the_course_is_there_in_light_and_dark() -> None:
    for path in course.chapters():
        for line in path.read_text("utf-8").split("\n"):
            for name in line.split('"') if "<source" in line or "<img" in line else []:
                if name.endswith(".svg"):
                    assert (path.parent / name).is_file(), f"{path.name}: {name}"
