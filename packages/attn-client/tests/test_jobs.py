"""Watching a job loses no event and doubles none, whatever happens to the connection."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from attn.v1 import training_pb2
from attn_client import AsyncClient, Client, ClientSettings
from attn_core import errors
from attn_gateway import GatewaySettings
from attn_schema.codec import from_message
from attn_schema.training import JobEvent, JobState, Metrics, OptimizerConfig, TrainingConfig, TrainingJob


def config(steps: int = 12) -> TrainingConfig:
    return TrainingConfig(optimizer=OptimizerConfig(steps=steps))


def ids(updates: list[TrainingJob | JobEvent]) -> list[int]:
    return [update.id for update in updates if isinstance(update, JobEvent)]


def test_a_watch_begins_with_the_job_and_brings_every_event(client: Client) -> None:
    job = client.jobs.submit(config())
    updates = list(client.jobs.watch(job.id))
    assert isinstance(updates[0], TrainingJob)
    assert (updates[0].state, updates[0].config.optimizer.steps) == (JobState.SUCCEEDED, 12)
    assert ids(updates) == list(range(1, 13))
    assert isinstance(updates[1].payload, Metrics)
    assert updates[4].payload == Metrics(step=4, values={"loss": 0.25})


def test_a_watch_can_begin_later(client: Client) -> None:
    assert ids(list(client.jobs.watch("job-1", after=9))) == [10, 11, 12]


def test_a_broken_watch_goes_on_behind_the_last_event(client: Client, server: Any) -> None:
    server.book.cut_after = [3, 0, 5]
    updates = list(client.jobs.watch("job-1"))
    assert ids(updates) == list(range(1, 13))
    assert sum(isinstance(update, TrainingJob) for update in updates) == 1
    assert server.book.watches == [0, 3, 3, 8]


def test_a_watch_outlives_a_restart_of_the_server(client: Client, server: Any) -> None:
    server.book.cut_after = [2]
    port = int(server.address.rpartition(":")[2])
    updates = client.jobs.watch("job-1")
    seen = [next(updates) for _ in range(3)]
    server.shut()
    restart = threading.Timer(0.5, server.open, [GatewaySettings(port=port)])
    restart.start()
    seen += updates
    restart.join()
    assert ids(seen) == list(range(1, 13))


def test_patience_ends(client: Client, server: Any) -> None:
    server.book.cut_after = [1] + [0] * 100
    with pytest.raises(errors.Unavailable, match="shutting down"):
        list(client.jobs.watch("job-1", patience=0.3))


def test_a_server_that_never_answered_is_not_waited_for() -> None:
    with Client(ClientSettings(address="127.0.0.1:1")) as client, pytest.raises(errors.Unavailable):
        next(client.jobs.watch("job-1"))


def test_a_failed_job_carries_its_error(client: Client, server: Any) -> None:
    server.book.state = JobState.FAILED
    job = client.jobs.get("job-1")
    assert job.state.final
    assert job.error is not None
    assert isinstance(job.error.error(), errors.OutOfCapacity)
    assert job.error.message == "the disk is full"


async def test_the_asyncio_watch_goes_on_too(server: Any) -> None:
    server.book.cut_after = [4]
    async with AsyncClient(ClientSettings(address=server.address)) as client:
        updates = [update async for update in client.jobs.watch("job-1")]
    assert ids(updates) == list(range(1, 13))
    assert server.book.watches == [0, 4]


def test_a_state_from_the_future_is_unknown() -> None:
    message = training_pb2.TrainingJob(state=99)  # type: ignore[arg-type]
    assert from_message(TrainingJob, message).state is JobState.UNKNOWN
