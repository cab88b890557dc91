"""Prices of steps beside counts by hand, budgets, and intervals beside integrals and simulations."""

from __future__ import annotations

import math
import random
import re

import pytest
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.admission import check_config
from attn_train.comparison.budget import Budget
from attn_train.comparison.plan import Question, parse_entries, parse_sizes, planned
from attn_train.comparison.statistics import T_QUANTILES, Interval, fitted_exponent, t_quantile
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.pricing import seconds_of_a_step, step_price

MANY = ["mha", "gqa:num_kv_heads=1", "mqa", "sliding_window:window=4", "linear", "gla", "retnet", "alibi"]


@pytest.fixture
def base(words, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text(words)
    return TrainingConfig(
        model=ModelConfig(hidden_size=16, num_layers=2, num_heads=2, max_seq_len=16),
        data=DataConfig(dataset=str(tmp_path / "data" / "words.txt")),
        optimizer=OptimizerConfig(batch_size=3, learning_rate=1e-2),
    )


def plan(base, home, entries=("mha",), budget="flops=1e8", **more):
    question = Question(config=base, entries=parse_entries(",".join(entries)), budget=Budget.parse(budget), **more)
    return planned(question, home, lambda _: None)


def test_the_flops_of_a_step_of_mha_are_those_counted_by_hand(base, tmp_path):
    config = resolved(base.replace(model=base.model.replace(mechanism="mha", num_kv_heads=None)))
    dataset = load_dataset(config, tmp_path, lambda _: None)
    batch, tokens, width, layers, vocabulary = 3, 16, 16, 2, dataset.tokenizer.vocab_size
    # The feed-forward is a SwiGLU, of three matrices; 8/3 of a width of 16, rounded up to a multiple of 8, are 48.
    weights = layers * (4 * width**2 + 3 * width * 48) + width * vocabulary
    pairs = tokens * (tokens + 1) // 2
    forward = batch * (2 * weights * tokens + layers * 2 * 2 * pairs * width)
    price = step_price(config, dataset)
    assert price.flops == 3 * forward
    assert price.tokens == batch * tokens
    assert price.cache_bytes == layers * 2 * tokens * width * 4
    assert price.embedding_parameters == width * vocabulary
    twice = config.replace(optimizer=config.optimizer.replace(gradient_accumulation_steps=2))
    assert step_price(twice, dataset).flops == 6 * forward
    again = config.replace(gradient_checkpointing=True)
    assert step_price(again, dataset).flops == 4 * forward


def test_every_mechanism_gets_all_whole_steps_that_the_budget_buys(base, tmp_path):
    runs = plan(base, tmp_path, MANY, seeds=2)
    assert len(runs) == 2 * len(MANY) == len({run.id for run in runs})
    for run in runs:
        assert run.flops <= 1e8 < run.flops + run.price.flops
    assert len({run.config.optimizer.steps for run in runs}) > 3
    assert {run.config.seed for run in runs[: len(MANY)]} == {0}


def test_tokens_buy_every_mechanism_the_same_steps_and_minutes_what_was_timed(base, tmp_path):
    assert {run.config.optimizer.steps for run in plan(base, tmp_path, MANY, "tokens=4800")} == {100}
    (run,) = plan(base, tmp_path, budget="minutes=0.05", seeds=1)
    dataset = load_dataset(run.config, tmp_path, lambda _: None)
    said = 3.0 / run.config.optimizer.steps
    assert said == pytest.approx(seconds_of_a_step(run.config, dataset), rel=20)
    assert said > 0


def test_warm_up_and_measurements_fit_into_the_steps(base, tmp_path):
    warm = base.replace(optimizer=base.optimizer.replace(warmup_steps=1000))
    (run,) = plan(warm, tmp_path, budget="tokens=480", seeds=1)
    assert (run.config.optimizer.steps, run.config.optimizer.warmup_steps) == (10, 5)
    assert run.config.evaluation.eval_steps == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"entries": ["no_such"]}, "no_such"),
        ({"entries": ["mha", "mha"]}, "each mechanism once"),
        ({"entries": [""]}, "commas"),
        ({"entries": ["linformer"]}, "can be causal"),
        ({"entries": ["mha:bogus=1"]}, "bogus"),
        ({"entries": ["gqa:num_kv_heads=3"]}, "divisor of the 2 query heads"),
        ({"budget": "flops=10"}, "one step of mha"),
        ({"budget": "tokens=10"}, "at least tokens=48"),
        ({"budget": "hours=3"}, "flops=NUMBER"),
        ({"budget": "flops=nan"}, "above 0"),
        ({"budget": "flops=-1"}, "above 0"),
        ({"probes": ["riddles"]}, "recall, needle, glossary, swaps"),
        ({"seeds": 0}, "from 1"),
        ({"name": "a/b"}, "letters"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_anything_starts(base, tmp_path, given, said):
    with pytest.raises((InvalidValue, UnknownName, Incompatible), match=said.replace("*", ".")):
        plan(base, tmp_path, **given)
    assert not (tmp_path / "comparisons").exists()
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("field", [{"mechanism": "mha"}, {"options": {"window": 3}}, {"base_model": "x"}])
def test_options_of_the_model_that_the_entries_decide_are_refused(base, tmp_path, field):
    with pytest.raises(InvalidValue, match=next(iter(field))):
        plan(base.replace(model=base.model.replace(**field)), tmp_path)


@pytest.mark.parametrize("text", ["8x2", "8x2,8x2,8x2", "8,16,32", "0x1,2x1,3x1", "axb,8x2,9x2"])
def test_sizes_are_three_pairs_of_numbers(text):
    with pytest.raises(InvalidValue, match="three"):
        parse_sizes(text)


def test_ids_are_those_of_jobs_however_long_names_are(base, tmp_path):
    entries = ["sliding_window:window=4:head_dim=8:num_kv_heads=1:intermediate_size=64", "sliding_window:window=5"]
    runs = plan(base, tmp_path, entries, name="a-rather-long-name-of-32-letters")
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run.id) for run in runs)
    assert len({run.id for run in runs}) == 6
    for run in runs:
        check_config(run.config, home=tmp_path)


def density(t: float, freedom: int) -> float:
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    return math.exp(scale) * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.parametrize("freedom", range(1, len(T_QUANTILES) + 1))
def test_between_the_quantiles_lies_the_integral_of_the_density_that_is_wanted(freedom):
    end, parts = t_quantile(freedom), 2000
    step = end / parts
    weights = (1 if place in (0, parts) else 4 if place % 2 else 2 for place in range(parts + 1))
    inside = 2 * step / 3 * sum(w * density(place * step, freedom) for place, w in enumerate(weights))
    assert inside == pytest.approx(0.95, abs=2e-5)


def test_intervals_hold_the_mean_of_three_seeds_nineteen_times_of_twenty():
    draw = random.Random(3)
    found = [Interval.of_mean([draw.gauss(5, 2) for _ in range(3)]) for _ in range(2000)]
    assert sum(abs(i.value - 5) <= i.half_width for i in found) / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_seed_has_no_interval():
    alone = Interval.of_mean([1.5])
    assert (alone.value, alone.text(2)) == (1.5, "1.50")
    assert math.isnan(alone.half_width)


def test_the_exponent_of_a_power_law_is_found_and_its_interval_holds_it_under_noise():
    sizes = [1e3, 1e4, 1e5]
    exact = fitted_exponent(sizes, [7 * size**-0.076 for size in sizes])
    assert exact.value == pytest.approx(0.076)
    draw, held = random.Random(5), 0
    for _ in range(1000):
        points = [size for size in sizes for _ in range(3)]
        fit = fitted_exponent(points, [7 * size**-0.076 * math.exp(draw.gauss(0, 0.05)) for size in points])
        held += abs(fit.value - 0.076) <= fit.half_width
    assert held / 1000 == pytest.approx(0.95, abs=0.025)
