"""Worked examples print the numbers of the layers, and those of the courses."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, UserError
from attn_experiments.worked.command import written
from attn_experiments.worked.examples import hi_how_are_you, read_rows, three_tokens, worked
from cases import each

DRAWS = {"sampled", "visual_hard"}
PAGE = 144
"""The numbers that a step may have to be read."""
VECTORS = {"shaw", "dependency"}
"""Those that add learned vectors to the values."""


@each("name", installed().mechanisms.names())
def test_the_printed_numbers_are_those_of_the_layer(name):
    torch.manual_seed(0)
    example = worked(installed().mechanisms.get(name), {})
    steps = {step.name: step.values for step in example.steps}
    torch.manual_seed(0)
    if name.split("/")[-1] not in DRAWS:
        torch.testing.assert_close(steps["out"], example.expected, rtol=0, atol=1e-12)
    assert max(values.numel() for values in steps.values()) <= PAGE
    if "α v" in steps and name not in VECTORS:
        heads, width = len(steps["α"]), steps["α v"].shape[-1]
        each = steps["v"].repeat_interleave(heads // len(steps["v"]), 0)
        torch.testing.assert_close(steps["α v"], steps["α"] @ each[..., :width], rtol=0, atol=1e-12)
    if "step by step" in steps:
        torch.testing.assert_close(steps["step by step"], steps["out"], rtol=0, atol=1e-5)


def test_cl_45_and_46_are_measured_by_the_layers():
    from attn_experiments.report import Settings

    assert three_tokens(Settings()).verdict == "holds"
    assert hi_how_are_you(Settings()).verdict == "does not hold"


@pytest.mark.parametrize(
    ("name", "pairs", "seen"),
    [
        ("sliding_window", 19, {3: [2, 3, 4]}),
        ("dilated_window", 17, {3: [1, 3, 5]}),
        ("strided", None, {10: [2, 6, 7, 8, 9, 10]}),
        ("fixed", None, {10: [3, 7, 8, 9, 10]}),
    ],
)
def test_the_masks_that_courses_draw_have_their_pairs(name, pairs, seen):
    mask = next(step.values for step in worked(installed().mechanisms.get(name), {}).steps if step.name == "M")[0]
    assert pairs is None or int(mask.sum()) == pairs
    for query, keys in seen.items():
        assert mask[query].nonzero().flatten().tolist() == keys


def test_the_command_prints_the_courses_numbers_and_those_of_a_file(attn, tmp_path):
    assert "1.9366  6.6831  1.5951" in attn("worked", "dot")
    file = tmp_path / "x.txt"
    file.write_text("1, 0, 1, 0\n\n0 2 0 2\n")
    steps = {s["name"]: s["values"] for s in json.loads(attn("worked", "dot", "--x", str(file), "--json"))["steps"]}
    assert steps["x"] == [[1, 0, 1, 0], [0, 2, 0, 2]]
    assert len(steps["out"]) == 2
    with pytest.raises(UserError):
        attn("worked", "mha", "--x", str(file), "-o", "nothing=1")


@pytest.mark.parametrize("text", ["1 2\n1 2 3\n", "1 a\n", "\n", "1 nan\n"])
def test_what_is_no_matrix_is_refused(tmp_path, text):
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(InvalidValue, match="--x"):
        read_rows(tmp_path / "x.txt")


@pytest.mark.parametrize(("value", "digits", "text"), [(100, 0, "100"), (-0.04, 1, "0"), (-1.5, 4, "-1.5")])
def test_rounding_keeps_whole_numbers_and_gives_zero_no_sign(value, digits, text):
    assert written(value, digits) == text
