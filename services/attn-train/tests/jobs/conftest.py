"""A database of each kind, empty for each test; a job, and attempts at it that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from attn_gateway.records import Database, database_url
from attn_schema.training import LogLine, Metrics, TrainingConfig
from attn_train.attempt import Finished, Lost, TrainingStarted
from attn_train.store import JobStore

NUMBERS = count()
SCRIPTS = [(range(1, 8), Lost), (range(4, 10), Lost), (range(8, 13), Finished)]
"""The steps that attempts measure, and how they end."""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.sqlite3'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name}")
    return str(server.url).replace("/postgres?", f"/{name}?")


@pytest.fixture
def job(tmp_path: Path, config: TrainingConfig) -> Iterator[JobStore]:
    """The store of a job named "job"."""
    store = JobStore(Database(database_url(tmp_path)))
    store.submit("job", config)
    yield store
    store.close()


def measured(step: int) -> Metrics:
    return Metrics(step=step, values={"loss": 1 / step, "learning_rate": 0.5})


@pytest.fixture(name="measured")
def measured_fixture() -> Callable[[int], Metrics]:
    """What is measured at a step: a loss of 1 / step."""
    return measured


@pytest.fixture
def events() -> Callable[[JobStore], Any]:
    """Makes of a store what writers of metrics read the job "job" by: `read(after, count)`, its events in order."""
    return lambda store: lambda after, count: store.events("job", after, count)


class LostTwice:
    """Attempts at twelve steps: two are lost, and the next does some steps again."""

    def start(self, assignment: Any, send: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
        steps, end = SCRIPTS[assignment.attempt - 1]
        send(TrainingStarted(step=steps[0] - 1, checkpoint=None))
        for step in steps:
            send(measured(step))
            send(LogLine(text="between"))
        ended(end(model_path="/model") if end is Finished else Lost(error=None))


@pytest.fixture
def lost_twice() -> LostTwice:
    return LostTwice()
