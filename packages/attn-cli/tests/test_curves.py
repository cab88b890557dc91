"""Curves of other runs are read as their programs write them, and drawn where their values are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from attn_cli.curves import MARKS, SEVERAL, Curve, drawn, read_curve
from attn_core.errors import InvalidValue

HISTORY = [
    {"epoch": 0.5, "grad_norm": 1.5, "loss": 3.0, "step": 1},
    {"epoch": 0.5, "eval_loss": 2.9, "step": 1},
    {"epoch": 1.0, "grad_norm": float("nan"), "loss": 2.0, "step": 2},
    {"epoch": 1.0, "step": 2, "train_loss": 2.5},
]


@pytest.mark.parametrize(
    ("name", "text", "metric", "points"),
    [
        ("trainer_state.json", json.dumps({"log_history": HISTORY}), "loss", [(1, 3.0), (2, 2.0)]),
        ("trainer_state.json", json.dumps({"log_history": HISTORY}), "validation_loss", [(1, 2.9)]),
        ("trainer_state.json", json.dumps({"log_history": HISTORY}), "gradient_norm", [(1, 1.5)]),
        ("a.csv", "\ufeffstep, loss\r\n10,1e-3\r\n20,\r\n30,2\r\n", "loss", [(10, 0.001), (30, 2.0)]),
        ("a.jsonl", '{"step": 1, "loss": "NaN"}\n{"step": 2, "loss": 4}\n\n', "loss", [(2, 4.0)]),
    ],
)
def test_a_curve_is_read_as_it_was_written(tmp_path: Path, name, text, metric, points):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert read_curve(path, metric) == Curve(str(path), points)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.json", None),
        ("a.json", b"{"),
        ("a.json", b"[1]"),
        ("a.json", b"{}"),
        ("a.json", b'{"log_history": {"a": 1}}'),
        ("a.json", b'{"log_history": [1]}'),
        ("a.json", b'{"log_history": []}'),
        ("a.json", b'{"log_history": [{"step": 1, "eval_loss": 2}]}'),
        ("a.json", b'{"log_history": [{"loss": 2}]}'),
        ("a.json", b'{"log_history": [{"step": 1.5, "loss": 2}]}'),
        ("a.json", b'{"log_history": [{"step": 1, "loss": [2]}]}'),
        ("a.json", b'{"log_history": [{"step": 1, "loss": NaN}]}'),
        ("a.json", b'{"log_history": [{"step": 1, "loss": 1' + b"0" * 400 + b"}]}"),
        ("a.json", b"[" * 100_000),
        ("a.json", b"\xff\xfe{}"),
        ("a.csv", b""),
        ("a.csv", b"step,loss\n1,two\n"),
        ("a.csv", b'step,loss\n1,"2'),
        ("a.jsonl", b"1\n"),
        ("a.png", b"step,loss\n1,2\n"),
    ],
)
def test_a_file_that_is_no_curve_is_one_error_with_its_path(tmp_path: Path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValue, match=name):
        read_curve(tmp_path / name, "loss")


def test_curves_are_drawn_at_their_values_and_named():
    steps = random.Random(0).sample(range(1000), 60)
    ours = Curve("job", [(0, 4.0), *((step, 4.0 - step / 500) for step in sorted(steps)), (1000, 2.0)])
    theirs = Curve("their.csv", [(0, 4.0), (1000, 0.0)])
    lines = drawn([ours, theirs], 41, 21).splitlines()
    rows = [line.partition("│")[2] for line in lines[:21]]
    assert rows[0][0] == SEVERAL
    marked = [(row, column) for row, line in enumerate(rows) for column, mark in enumerate(line) if mark == MARKS[0]]
    assert len(marked) > 25
    assert all(abs(row - column / 4) <= 1 for row, column in marked)
    assert [(row, line.index(MARKS[1])) for row, line in enumerate(rows) if MARKS[1] in line] == [(20, 40)]
    assert lines[0].startswith("4.0")
    assert lines[20].lstrip().startswith("0")
    assert lines[22].split() == ["0", "1000"]
    assert lines[23:] == [f"{MARKS[0]} job: 2.0000 at step 1000", f"{MARKS[1]} their.csv: 0 at step 1000"]


def test_one_point_is_a_curve():
    assert MARKS[0] in drawn([Curve("a", [(5, 1.0)])], 20, 5)


def test_the_largest_values_are_drawn():
    curve = Curve("a", [(step, sign * 1e300) for step, sign in enumerate([1, -1] * 50)])
    assert MARKS[0] in drawn([curve], 20, 5)
