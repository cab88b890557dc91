"""Whole comparisons: in this process and on a server, again, after an interruption, and their report."""

from __future__ import annotations

import asyncio
import json
import shutil
from html.parser import HTMLParser

import pytest
import torch
from attn_client.client import Client
from attn_client.settings import ClientSettings
from attn_core.errors import AlreadyExists, InternalError
from attn_gateway import Cluster, ClusterSettings, serving
from attn_models.loading import load_model
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.comparison.budget import Budget
from attn_train.comparison.plan import Question, parse_entries, parse_sizes, planned
from attn_train.comparison.report import page, picture, png
from attn_train.comparison.results import as_json, grouped, scaling, table
from attn_train.comparison.runs import ComparisonFolder, RunsHere, RunsOnServer, trained
from attn_train.service import TrainingGrpc
from attn_train.settings import Layout, TrainSettings


@pytest.fixture
def home(tmp_path, words):
    folder = tmp_path / "home"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "words.txt").write_text(words)
    return folder


@pytest.fixture
def ask(home):
    def make(entries="mha,linear", **more):
        config = TrainingConfig(
            model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=32),
            data=DataConfig(dataset=str(home / "data" / "words.txt"), max_pairs=300),
            optimizer=OptimizerConfig(batch_size=4, learning_rate=1e-2),
            checkpoint=CheckpointConfig(save_steps=4),
            evaluation=EvaluationConfig(eval_batches=2),
        )
        given = {"budget": Budget.parse("tokens=1600"), "seeds": 2, "name": "few", **more}
        return Question(config=config, entries=parse_entries(entries), **given)

    return make


def here(question, home, say=lambda _: None):
    folder = ComparisonFolder(home, question.title)
    runs = folder.settled(question, planned(question, home, lambda _: None))
    runner = RunsHere(home, folder, TrainSettings().threads)
    return runs, {run.id: (run, course) for run, course in trained(runs, runner, say)}


def without_times(course):
    timed = ("elapsed_seconds", "tokens_per_second")
    return [(step, {k: v for k, v in values.items() if k not in timed}) for step, values in course.points]


def test_each_run_is_a_model_and_asking_again_runs_nothing(ask, home):
    question, said = ask(probes=["recall"]), []
    runs, found = here(question, home)
    assert [len(runs), len(found)] == [8, 8]
    for run, course in found.values():
        assert course.finished
        assert course.last["validation_loss"] > 0
        model = load_model(Layout(home).model(run.id)).model
        assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
        assert set(model.layer_mechanisms().values()) == {run.label}
    accuracies = [course.last.get("answer_accuracy") for run, course in found.values() if run.dataset == "recall"]
    assert all(0 <= value <= 1 for value in accuracies)
    _, again = here(question, home, said.append)
    assert said == []
    assert {name: course for name, (_, course) in again.items()} == {n: c for n, (_, c) in found.items()}


def test_an_interrupted_run_goes_on_to_what_it_would_have_found(ask, home):
    question = ask("mha", seeds=1)
    runs, found = here(question, home)
    (run,) = runs
    assert run.config.optimizer.steps == 12
    # As after a kill between the checkpoints of steps 8 and 12, in the middle of a line.
    Layout(home).checkpoints(run.id).joinpath("step-000000012").rename(home / "gone")
    shutil.rmtree(Layout(home).model(run.id))
    lines = home / "comparisons" / "few" / "runs" / f"{run.id}.jsonl"
    lines.write_text("\n".join(lines.read_text().splitlines()[:9]) + '\n{"step": 10, "val')
    said = []
    _, again = here(question, home, said.append)
    assert any("12 steps" in line for line in said)
    assert without_times(again[run.id][1]) == without_times(found[run.id][1])
    assert again[run.id][1].finished


def test_a_run_that_fails_is_named_and_the_others_go_on(ask, home):
    class Broken(RunsHere):
        def train(self, run, say):
            if run.label == "linear":
                raise InternalError("no luck")
            return super().train(run, say)

    question = ask(seeds=1)
    folder = ComparisonFolder(home, question.title)
    runs = folder.settled(question, planned(question, home, lambda _: None))
    found = {run.id: (run, course) for run, course in trained(runs, Broken(home, folder, None), lambda _: None)}
    results = as_json(question, grouped(found))
    assert [row["mechanism"] for row in results["groups"]] == ["mha"]
    assert results["failures"] == [f"{runs[1].id}: no luck"]


def test_another_question_does_not_take_over_a_name(ask, home):
    here(ask("mha", seeds=1), home)
    runs = planned(ask("linear", seeds=1), home, lambda _: None)
    with pytest.raises(AlreadyExists, match="--name"):
        ComparisonFolder(home, "few").settled(ask("linear", seeds=1), runs)
    unnamed = {ask(entries, name="").title for entries in ("mha", "linear", "mha,linear")}
    assert len(unnamed) == 3


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data):
        self.cells.append(data)


def test_the_page_needs_no_other_file_and_has_the_table_and_the_fits(ask, home):
    question = ask("mha", sizes=parse_sizes("8x1,16x1,24x1"), budget=Budget.parse("tokens=800"))
    _, found = here(question, home)
    groups = grouped(found)
    drawn = picture(question, groups)
    html = page(question, groups, drawn, "attn compare --train '<b>'")
    links = Links()
    links.feed(html)
    assert "<svg" in html
    assert all(link.startswith("#") for link in links.found)
    assert "<b>'" not in html
    for row in table(question, groups):
        assert row["mechanism"] in links.cells
        assert row["validation loss"] in links.cells
    (fit,) = scaling(question, groups)
    assert fit["points"] == 6
    assert fit["exponent of parameters"] in links.cells
    assert png(drawn).startswith(b"\x89PNG")
    names = [(axes, name) for axes in drawn.axes for name in axes.texts]
    assert len(names) == 3
    for axes, name in names:
        box, room = name.get_window_extent(), axes.get_window_extent()
        assert room.x0 <= box.x0 < box.x1 <= room.x1, f"{name.get_text()} is cut off"
    found = json.loads(json.dumps(as_json(question, groups)))
    (line,) = found["scaling"]
    assert f"{line['exponent']['value']:.4f}" in fit["exponent of parameters"]
    assert [group["validation_loss"]["value"] for group in found["groups"]] == [
        group.interval("validation_loss").value for group in groups
    ]


async def test_on_a_server_each_run_is_a_job_with_the_same_losses(ask, home, tmp_path):
    question = ask(seeds=1)
    _, local = here(question, home)
    other = tmp_path / "server"
    shutil.copytree(home / "data", other / "data")
    service = TrainingGrpc(Cluster(ClusterSettings(home=other)), TrainSettings(data_roots=(home, other)))

    def compare(address):
        with Client(ClientSettings(address=address)) as client:
            runs = planned(question, home, lambda _: None)
            found = {run.id: course for run, course in trained(runs, RunsOnServer(client), lambda _: None)}
            again = RunsOnServer(client)
            assert all(again.course(run) == found[run.id] for run in runs)
            return found

    async with serving([service], shutdown_timeout=20.0) as gateway:
        found = await asyncio.to_thread(compare, gateway.address)
    for run_id, course in found.items():
        assert without_times(course) == without_times(local[run_id][1])
        assert (other / "models" / run_id).is_dir()
