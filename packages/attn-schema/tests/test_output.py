"""Tables: what they show, how they give way on a narrow terminal, and what they never cut."""

from __future__ import annotations

import re
import sys

import pytest
from attn_schema.output import print_table

ROWS = [
    {"name": "gqa", "summary": "query heads share keys and values in groups", "paper": "Ainslie et al., 2023"},
    {"name": "a_mechanism_with_a_long_name", "summary": "short", "paper": ""},
]


def test_into_a_pipe_every_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, "none")
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ROWS)
    assert all(value in lines[0] for value in ROWS[0].values())
    assert lines[0].index("query heads") == lines[1].index("short") == head.index("summary")


@pytest.mark.parametrize("width", [30, 60, 100])
def test_on_a_terminal_names_and_words_stay_whole_and_none_is_lost(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(ROWS, "none")
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width
    assert any(line.startswith("a_mechanism_with_a_long_name") for line in out.splitlines())
    given = [word for row in ROWS for value in row.values() for word in value.split()]
    assert set(given) <= set(out.replace(";", "").split())


def test_line_ends_in_a_cell_do_not_break_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"name": "x", "reason": "first\nsecond"}], "none")
    assert capsys.readouterr().out.splitlines()[2].split() == ["x", "first", "second"]


def test_nothing_to_print_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([], "no kernels are installed")
    assert capsys.readouterr().out == "no kernels are installed\n"
