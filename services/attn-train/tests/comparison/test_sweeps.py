"""Combinations of options: grids and draws, the runs they become, and what is refused before anything starts."""

from __future__ import annotations

import math

import pytest
from attn_core.errors import InvalidValue, UnknownName
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.admission import check_config
from attn_train.comparison.plan import Question
from attn_train.comparison.results import grouped, table
from attn_train.comparison.runs import ComparisonFolder, RunsHere, trained
from attn_train.comparison.sweep import combinations, parse_axes, planned_sweep, with_options


@pytest.fixture
def question(words, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text(words)
    config = TrainingConfig(
        model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=8),
        data=DataConfig(dataset=str(tmp_path / "data" / "words.txt")),
        optimizer=OptimizerConfig(steps=10, batch_size=2),
    )
    return Question(config=config, entries=(), budget=None, seeds=1, name="swept")


def test_a_grid_has_each_combination_once_and_draws_are_some_of_them():
    axes = parse_axes(["learning_rate=1e-3,3e-3", "num_layers=1,2,3"])
    grid = combinations(axes, None, 0)
    assert len(grid) == 6 == len({tuple(chosen.items()) for chosen in grid})
    drawn = combinations(axes, 4, 0)
    assert len({tuple(chosen.items()) for chosen in drawn}) == 4
    assert all(chosen in grid for chosen in drawn)
    assert combinations(axes, 4, 0) == drawn != combinations(axes, 4, 1)
    assert len(combinations(axes, 99, 0)) == 6


def test_a_range_is_drawn_evenly_on_a_logarithmic_scale():
    drawn = [c["learning_rate"] for c in combinations(parse_axes(["learning_rate=1e-4..1e-2"]), 2000, 3)]
    assert min(drawn) >= 1e-4
    assert max(drawn) <= 1e-2
    assert sum(rate < 1e-3 for rate in drawn) / 2000 == pytest.approx(0.5, abs=0.05)
    assert sum(map(math.log10, drawn)) / 2000 == pytest.approx(-3, abs=0.06)


def test_options_reach_their_part_of_the_configuration(question):
    made = with_options(question.config, {"learning_rate": 0.5, "num_heads": 4, "precision": "bfloat16"})
    assert (made.optimizer.learning_rate, made.model.num_heads, made.precision) == (0.5, 4, "bfloat16")
    assert made.data == question.config.data


def test_runs_are_ranked_by_their_loss(question, tmp_path):
    chosen = combinations(parse_axes(["learning_rate=1e-6,3e-2"]), None, 0)
    runs = planned_sweep(question, chosen, tmp_path, lambda _: None)
    folder = ComparisonFolder(tmp_path, question.title)
    runner = RunsHere(tmp_path, folder, None)
    found = {run.id: (run, course) for run, course in trained(folder.settled(question, runs), runner, lambda _: None)}
    rows = table(question, grouped(found))
    assert [row["mechanism"] for row in rows] == ["learning_rate=0.03", "learning_rate=1e-06"]
    assert {row["steps"] for row in rows} == {10}


@pytest.mark.parametrize(
    ("vary", "samples", "error", "said"),
    [
        ([], None, InvalidValue, "at least one option"),
        (["lerning_rate=1"], None, UnknownName, "learning_rate"),
        (["seed=1,2"], None, UnknownName, "seed"),
        (["learning_rate="], None, InvalidValue, "NAME=VALUE"),
        (["steps=1", "steps=2"], None, InvalidValue, "once"),
        (["learning_rate=1e-2..1e-4"], 3, InvalidValue, "LOW < HIGH"),
        (["learning_rate=1e-4..1e-2"], None, InvalidValue, "--samples"),
        (["learning_rate=-1"], None, InvalidValue, "learning_rate"),
        (["num_layers=many"], None, InvalidValue, "num_layers"),
        (["num_heads=3"], None, InvalidValue, "num_heads=3"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_by_name(question, tmp_path, vary, samples, error, said):
    with pytest.raises(error, match=said):
        planned_sweep(question, combinations(parse_axes(vary), samples, 0), tmp_path, lambda _: None)
    assert not (tmp_path / "jobs").exists()


def test_languages_are_refused_where_there_are_no_pairs(question, tmp_path):
    config = question.config.replace(data=question.config.data.replace(languages="en-de"))
    with pytest.raises(InvalidValue, match="languages"):
        check_config(config, home=tmp_path)
