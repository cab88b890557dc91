"""Tables: what they show, how they give way on a narrow terminal, and what they never cut."""

from __future__ import annotations

import pytest
from attn_cli.tables import print_table, table

ROWS = [
    {"name": "gqa", "summary": "query heads share keys and values in groups", "paper": "Ainslie et al., 2023"},
    {"name": "a_mechanism_with_a_long_name", "summary": "short", "paper": ""},
]


def test_without_a_width_every_row_is_one_line() -> None:
    lines = table(ROWS)
    assert len(lines) == 2 + len(ROWS)
    assert all(value in lines[2] for value in ROWS[0].values())


def test_columns_begin_below_their_headings() -> None:
    head, _, *lines = table(ROWS)
    assert lines[0].index("query heads") == lines[1].index("short") == head.index("summary")


def test_on_a_narrow_terminal_names_stay_whole_and_the_rest_is_wrapped() -> None:
    lines = table(ROWS, 60)
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("a_mechanism_with_a_long_name") for line in lines)
    assert len(lines) > 2 + len(ROWS)


@pytest.mark.parametrize("width", [1, 7, 20, 33, 40, 64, 100])
def test_no_character_is_lost_whatever_the_width(width: int) -> None:
    told = [*ROWS, {"name": "x", "summary": "", "paper": "a_word_of_more_characters_than_a_column_has"}]
    printed = "".join(table(told, width)[2:]).replace(" ", "")
    given = "".join(value for row in told for value in row.values()).replace(" ", "")
    assert sorted(printed) == sorted(given)


def test_line_ends_in_a_cell_do_not_break_the_row() -> None:
    assert table([{"name": "x", "reason": "first\nsecond"}])[2] == "x     first second"


def test_nothing_to_print_is_said_in_words(capsys) -> None:
    print_table([], "no kernels are installed")
    assert capsys.readouterr().out == "no kernels are installed\n"
