"""A job as a W&B run: each step once, whatever was killed in between; its library only where it is asked for."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
import types

import msgspec
import pytest
from attn_core.errors import InvalidValue
from attn_schema.training import JobState
from attn_train.job_metrics import WandbRun
from attn_train.metrics_files import LINES
from attn_train.settings import TrainSettings
from attn_train.supervisor import Supervisor, SupervisorSettings

KILLED = """
import os, sys
from pathlib import Path
from attn_gateway.records import Database, database_url
from attn_train.job_metrics import WandbRun
from attn_train.store import JobStore

store = JobStore(Database(database_url(Path(sys.argv[1]))))
WandbRun(Path(sys.argv[1]) / "jobs" / "job", "job", {}).catch_up(lambda after, count: store.events("job", after, count))
os._exit(9)
"""
"""A process that logs to a run and does not end it."""
BLOCK = 32_768


class Library:
    """In the place of `wandb`: keeps what is logged, and of an online run what an earlier object logged too."""

    Error = type("Error", (Exception,), {})

    def __init__(self):
        self.runs, self.failing = [], False

    def Settings(self, **settings):  # noqa: N802
        return settings

    def init(self, **asked):
        if self.failing:
            raise self.Error("no space")
        earlier = [run for run in self.runs if run.asked["id"] == asked["id"] and asked["mode"] == "online"]
        self.runs.append(Run(asked, max((run.step for run in earlier), default=0)))
        return self.runs[-1]


class Run:
    def __init__(self, asked, step):
        self.asked, self.step, self.rows, self.finished = asked, step, [], False

    def log(self, values, step):
        assert not self.finished
        assert step >= self.step
        self.step = step + 1
        self.rows.append((step, values["loss"]))

    def finish(self):
        self.finished = True


def rows_of(steps):
    return [(step, 1 / step) for step in steps]


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setitem(sys.modules, "wandb", found)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return found


@pytest.fixture
def run_job(tmp_path, job, lost_twice):
    """Supervises the job to its end."""
    return Supervisor("job", lost_twice, SupervisorSettings(home=tmp_path, poll=0.01, log_to="wandb")).run


def writer(home, job):
    return WandbRun(home, "job", msgspec.to_builtins(job.get("job").config))


def test_the_last_run_of_a_job_has_each_step_once_and_ended_before_the_job(run_job, job, library):
    run_job()
    assert job.get("job").state is JobState.SUCCEEDED
    assert all(run.finished for run in library.runs)
    asked = library.runs[-1].asked
    assert (asked["id"], asked["project"], asked["mode"]) == ("job", "attn", "offline")
    assert asked["config"]["seed"] == 11
    assert library.runs[-1].rows == rows_of(range(1, 13))


def test_a_run_online_is_gone_on_with_after_the_last_step_that_is_there(run_job, library, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run_job()
    rows = [row for run in library.runs for row in run.rows]
    assert rows == rows_of(range(1, 13))
    assert {run.asked["project"] for run in library.runs} == {"mine"}


def test_a_run_that_cannot_be_written_leaves_the_job_and_its_other_files_alone(tmp_path, run_job, job, library, caplog):
    library.failing = True
    run_job()
    assert job.get("job").state is JobState.SUCCEEDED
    lines = (tmp_path / "jobs" / "job" / LINES).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert caplog.text.count("the W&B run cannot be written: W&B: no space") == 1


def test_an_earlier_offline_run_of_the_job_makes_place_and_that_of_another_stays(
    tmp_path, job, measured, events, library
):
    for name in ("offline-run-20260101_000000-job", "offline-run-20260101_000000-other"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    job.append("job", 1, [measured(1)])
    run = writer(tmp_path, job)
    run.catch_up(events(job))
    run.close()
    assert [path.name for path in (tmp_path / "wandb").iterdir()] == ["offline-run-20260101_000000-other"]


def test_nothing_is_asked_of_the_library_unless_it_is_asked_for(tmp_path, job, lost_twice, library):
    Supervisor("job", lost_twice, SupervisorSettings(home=tmp_path, poll=0.01)).run()
    assert not library.runs


def test_a_library_that_is_not_installed_is_refused_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidValue, match=r"ATTN_TRAIN_LOG_TO: 'wandb' needs .*pip install 'attn-train\[wandb\]'"):
        TrainSettings.from_environment({"ATTN_TRAIN_LOG_TO": "wandb"})


def test_another_place_to_log_to_is_refused_with_the_one_there_is(monkeypatch):
    with pytest.raises(InvalidValue, match="'mlflow' is not allowed; allowed: wandb"):
        TrainSettings.from_environment({"ATTN_TRAIN_LOG_TO": "mlflow"})
    found = types.SimpleNamespace()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert TrainSettings.from_environment({"ATTN_TRAIN_LOG_TO": "wandb"}).log_to == "wandb"
    assert TrainSettings.from_environment({}).log_to is None


def history(path):
    """(step, loss) in a file of W&B: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (rest := BLOCK - place % BLOCK) < 7:
            place += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if row:
                found.append((row["_step"], row["loss"]))
    return found


def test_the_file_of_the_library_itself_has_each_step_once(tmp_path, run_job, job, measured, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs attn-train[wandb]")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    try:
        job.append("job", 1, [measured(1), measured(2)])
        killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
        assert killed.returncode == 9
        assert len(list((tmp_path / "jobs" / "job" / "wandb").glob("offline-run-*"))) == 1
        run_job()
        assert job.get("job").state is JobState.SUCCEEDED
        wandb.teardown()  # waits for the library's own process, which completes the file after a run has finished
        found = list((tmp_path / "jobs" / "job" / "wandb").glob("offline-run-*"))
        assert len(found) == 1
        assert history(found[0] / "run-job.wandb") == rows_of(range(1, 13))
    finally:
        wandb.teardown()
