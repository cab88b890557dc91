"""What a worker process gets and sends, and which GPU it sees."""

from __future__ import annotations

import contextlib
import math
from datetime import UTC, datetime
from typing import get_args

import msgspec
import pytest
from attn_core.errors import Unavailable
from attn_schema.training import Checkpoint, JobError, LogLine, Metrics
from attn_train import attempt, processes
from attn_train.attempt import Assignment, Failed, Finished, Heartbeat, Lost, Resumed, Sent, Stalled, Stopped
from attn_train.processes import Gpus, WorkerProcesses
from attn_train.records import Stop

ERROR = JobError.of(Unavailable("gone", store="s3"))
SAVED = Checkpoint(step=3, path="/x", size_bytes=9, create_time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC))
MESSAGES = [
    attempt.TrainingStarted(step=3, checkpoint=SAVED),
    Heartbeat(),
    Metrics(step=1, values={"loss": 0.1 + 0.2, "norm": math.inf}),
    SAVED,
    LogLine(text="ж"),
    Stalled(error=ERROR),
    Resumed(),
]
OUTCOMES = [Finished(model_path="/m"), Stopped(stop=Stop.SAVE), Failed(error=ERROR), Lost(error=ERROR)]


@pytest.mark.parametrize("value", [*MESSAGES, *OUTCOMES], ids=lambda value: type(value).__name__)
def test_what_a_worker_sends_arrives_bit_for_bit(value):
    sent = msgspec.msgpack.encode(Sent.of(value))
    assert msgspec.msgpack.decode(sent, type=Sent).value() == value


def test_each_message_and_outcome_is_among_them():
    assert {type(value) for value in MESSAGES} == set(get_args(attempt.Message))
    assert {type(value) for value in OUTCOMES} == set(get_args(attempt.Outcome))


def test_an_assignment_arrives_as_it_is(config, tmp_path):
    given = Assignment(
        job_id="job", attempt=2, config=config, home=tmp_path, threads=1, artifacts="s3://x", owner="ann"
    )
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(given, enc_hook=str)))
    assert Assignment.from_mapping(plain) == given


def test_a_worker_gets_the_gpu_with_the_fewest_workers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    gpus = Gpus()
    assert [gpus.take(device) for device in ("cuda", "auto", "cpu", "cuda:1", "cuda")] == ["2", "5", None, None, "2"]
    gpus.give_back("5")
    assert gpus.take("cuda") == "5"
    assert gpus.count == 2


def test_a_worker_that_cannot_be_started_leaves_none_of_the_others(monkeypatch, config, changed, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    gpus, running = Gpus(), []

    class OnlyOne:
        def __init__(self, *_):
            if running:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            running.append(self)

        def kill(self):
            running.remove(self)

    monkeypatch.setattr(processes, "Child", OnlyOne)
    job = changed(config, workers=2, device="cuda")
    asked = Assignment(job_id="job", attempt=1, config=job, home=tmp_path, threads=1, artifacts=None, owner=None)
    with contextlib.suppress(BlockingIOError):
        WorkerProcesses(asked, gpus)
    assert not running
    assert [gpus.take("cuda") for _ in range(2)] == ["2", "5"], "both are free again"
