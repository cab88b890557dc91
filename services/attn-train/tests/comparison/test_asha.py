"""Runs that stop early: who goes on, with which budgets, and that courses are those of runs that never stopped."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from attn_client.client import Client
from attn_client.settings import ClientSettings
from attn_core.errors import AlreadyExists, InvalidValue
from attn_gateway import Cluster, ClusterSettings, serving
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobState,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.comparison.asha import Bracket, Contender, trained_by_asha
from attn_train.comparison.budget import Budget
from attn_train.comparison.plan import Question, parse_entries, planned
from attn_train.comparison.report import page, picture
from attn_train.comparison.results import as_json, grouped, table
from attn_train.comparison.runs import ComparisonFolder, RunsHere, RunsOnServer, trained
from attn_train.comparison.schedule import Asha
from attn_train.service import InProcessTrainingGrpc
from attn_train.settings import Layout, TrainSettings

FOUR = "mha,linear,retnet,sliding_window:window=3"


def silent(_words):
    """Nobody listens."""


@pytest.fixture
def home(tmp_path, words):
    folder = tmp_path / "home"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "words.txt").write_text(words)
    return folder


@pytest.fixture
def ask(home):
    def make(entries=FOUR, schedule="asha", factor=2, **more):
        config = TrainingConfig(
            model=ModelConfig(hidden_size=8, num_layers=1, num_heads=1, max_seq_len=8),
            data=DataConfig(dataset=str(home / "data" / "words.txt")),
            optimizer=OptimizerConfig(steps=100, batch_size=1, learning_rate=1e-2),
            checkpoint=CheckpointConfig(save_steps=1000),
            evaluation=EvaluationConfig(eval_batches=1),
        )
        parsed = parse_entries(entries)
        made = Asha.of(schedule, factor, len(parsed))
        return Question(
            **{"config": config, "entries": parsed, "budget": None, "seeds": 1, "name": "few", **more}, schedule=made
        )

    return make


def played(schedule, losses, draw=None, failing=()):
    """Whom a bracket lets go on, by rung: one at a time, or with `draw` all at the same time, ending in any order."""
    contenders = [Contender(()) for _ in losses]
    bracket, training, reached = Bracket(schedule, contenders), [], [[] for _ in schedule.rungs]
    while True:
        while (draw is not None or not training) and (found := bracket.following()) is not None:
            training.append(found)
        if not training:
            return reached
        contender, rung = training.pop(0 if draw is None else draw.randrange(len(training)))
        number = contenders.index(contender)
        if (number, rung) in failing:
            contender.failed = True
        else:
            assert len(contender.losses) == rung
            contender.losses.append(losses[number])
            reached[rung].append(number)


@pytest.mark.parametrize(("factor", "count"), [(2, 2), (2, 9), (3, 9), (3, 10), (3, 26), (4, 5)])
def test_one_at_a_time_exactly_the_best_go_on(factor, count):
    draw = random.Random(count)
    schedule = Asha.of("asha", factor, count)
    for _ in range(20):
        losses = draw.sample(range(1000), count)
        best = sorted(range(count), key=losses.__getitem__)
        for rung, reached in enumerate(played(schedule, losses)):
            assert sorted(reached) == sorted(best[: max(1, count // factor**rung)])


def test_side_by_side_the_best_reaches_the_end_whatever_the_order():
    draw = random.Random(1)
    schedule = Asha.of("asha", 3, 9)
    for _ in range(200):
        losses = draw.sample(range(1000), 9)
        first, middle, last = played(schedule, losses, draw)
        best = sorted(range(9), key=losses.__getitem__)
        assert sorted(first) == list(range(9))
        assert set(best[:3]) <= set(middle)
        assert best[0] in last
        assert len(last) <= len(middle) < 9


def test_the_place_of_one_that_fails_later_is_anothers():
    schedule = Asha.of("asha", 3, 9)
    losses = list(range(9))
    assert played(schedule, losses, failing={(0, 2)}) == [losses, [0, 1, 2], [1]]
    assert played(schedule, losses, failing={(0, 1)}) == [losses, [1, 2, 3], [1]]
    assert played(schedule, losses, failing={(number, 0) for number in losses}) == [[], [], []]


def test_those_who_had_gone_on_before_go_on_again():
    schedule = Asha.of("asha", 2, 4)
    contenders = [Contender((), measured) for measured in (-1, 0, 1, 0)]
    bracket = Bracket(schedule, contenders)
    reached = []
    while (found := bracket.following()) is not None:
        contender, rung = found
        contender.losses.append(float(contenders.index(contender)))
        reached.append((contenders.index(contender), rung))
    assert reached == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (0, 2)]


def test_steps_are_shared_out_so_that_budgets_are_equal_at_each_rung():
    for factor, count in [(2, 2), (2, 40), (3, 5), (3, 9), (4, 30), (10, 12)]:
        schedule = Asha.of("asha", factor, count)
        assert schedule.rungs[-1] == 1
        for steps in range(schedule.least_steps, schedule.least_steps + 300):
            whole = schedule.whole_steps(steps)
            assert 0.9 * steps < whole <= steps
            every, rest = divmod(whole, schedule.parts)
            assert rest == 0
            for share, step in zip(schedule.rungs, schedule.steps(whole), strict=True):
                assert step == share * whole
                assert step % every == 0


def by_asha(question, home, say=silent):
    folder = ComparisonFolder(home, question.title)
    runs = folder.settled(question, planned(question, home, silent))
    runner = RunsHere(home, folder, None)
    return {run.id: (run, course) for run, course in trained_by_asha(question.schedule, runs, runner, say)}


def in_full(question, home, say=silent):
    folder = ComparisonFolder(home, question.title)
    runs = folder.settled(question, planned(question, home, silent))
    return {run.id: (run, course) for run, course in trained(runs, RunsHere(home, folder, None), say)}


def losses(course):
    return {step: values["validation_loss"] for step, values in course.points}


def never_stopped(run, home):
    """The losses of the same run at one go."""
    alone = replace(run, id=f"alone-{run.id}")
    return losses(RunsHere(home, ComparisonFolder(home, "alone"), None).train(alone, silent))


def test_stopped_runs_keep_their_checkpoint_and_go_on_as_if_never_stopped(ask, home):
    question, said = ask(), []
    found = by_asha(question, home)
    assert Counter(course.steps for _, course in found.values()) == {24: 2, 48: 1, 96: 1}
    by_loss = sorted(found.values(), key=lambda pair: losses(pair[1])[24])
    assert all(course.steps > 24 for _, course in by_loss[:2])
    for run, course in found.values():
        assert Layout(home).model(run.id).is_dir() == course.finished
        assert (Layout(home).checkpoints(run.id) / f"step-{course.steps:09d}").is_dir()
    assert by_asha(question, home, said.append) == found
    assert said == []
    groups = grouped(found)
    rows = table(question, groups)
    assert [row["stopped"] for row in rows] == ["", "rung 2 of 3, 1/2", *["rung 1 of 3, 1/4"] * 2]
    html = page(question, groups, picture(question, groups), "attn compare")
    assert html.count("attn models load") == 1
    assert html.count("rung 1 of 3, 1/4; its checkpoint is kept") == 2
    assert sum(run["finished"] for run in as_json(question, groups)["runs"]) == 1
    # The same question without a schedule trains the others to their ends, where they would have come at once.
    whole = in_full(ask(schedule=""), home)
    assert all(course.finished for _, course in whole.values())
    run, _ = by_loss[-1]
    assert losses(whole[run.id][1]) == never_stopped(run, home)
    with pytest.raises(AlreadyExists, match="--name"):
        by_asha(ask(factor=3), home)


def test_seeds_of_a_mechanism_go_on_together(ask, home):
    found = by_asha(ask("mha,linear", seeds=2), home)
    best, other = sorted(grouped(found), key=lambda group: -group.steps)
    assert [course.steps for _, course in best.runs] == [100, 100]
    assert [course.steps for _, course in other.runs] == [50, 50]
    at_rung = [fmean(losses(course)[50] for _, course in group.runs) for group in (best, other)]
    assert at_rung == sorted(at_rung)


async def test_on_a_server_stopped_jobs_are_cancelled_with_the_losses_of_jobs_that_were_not(ask, home, tmp_path):
    question = ask()
    other = tmp_path / "server"
    shutil.copytree(home / "data", other / "data")
    service = InProcessTrainingGrpc(Cluster(ClusterSettings(home=other)), TrainSettings(data_roots=(home, other)))

    def compare(address):
        with Client(ClientSettings(address=address)) as client:
            runs = ComparisonFolder(home, "few").settled(question, planned(question, home, silent))
            first, again = (
                {run.id: found for run, found in trained_by_asha(question.schedule, runs, RunsOnServer(client), silent)}
                for _ in range(2)
            )
            return runs, first, again, {run.id: client.jobs.get(run.id).state for run in runs}

    async with serving([service], shutdown_timeout=20.0) as gateway:
        runs, found, again, states = await asyncio.to_thread(compare, gateway.address)
    assert set(states.values()) <= {JobState.SUCCEEDED, JobState.CANCELLED}
    assert any(course.finished for course in found.values())
    for name, course in found.items():
        assert states[name] is JobState.SUCCEEDED or not course.finished
        assert course.steps in question.schedule.steps(96)
        # A job may have trained on before it was cancelled: what it measured then is used when it is asked again.
        assert losses(course).items() <= losses(again[name]).items()
    run = min(runs, key=lambda run: found[run.id].steps)
    assert losses(found[run.id]).items() <= never_stopped(run, home).items()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": "hyperband"}, "asha"),
        ({"factor": 1}, "from 2"),
        ({"entries": "mha"}, "two or more"),
        ({"budget": Budget.parse("tokens=100")}, "at least 80 steps"),
    ],
    ids=str,
)
def test_a_schedule_that_cannot_be_is_refused(ask, home, given, said):
    with pytest.raises(InvalidValue, match=said):
        planned(ask(**given), home, silent)
