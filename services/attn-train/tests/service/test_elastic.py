"""A job goes on with the workers that there is room for: fewer at first, more when there is room, the same losses."""

from __future__ import annotations

import os
import queue
import signal

import psutil
import pytest
from attn_gateway.ray_process import RayProcess
from attn_schema.training import CheckpointConfig, LogLine, Metrics
from attn_train import ray_group
from attn_train.attempt import Assignment, Lost, Stopped, TrainingStarted
from attn_train.checkpoint import CheckpointFolder
from attn_train.records import Stop, StopFlag
from attn_train.worker import work

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SECONDS = 300
STEPS = 1_000_000
"""More than there is time for: the job is stopped."""


@pytest.fixture
def ray_with():
    """Starts Ray with so many processors."""
    started = []

    def start(cpus):
        started.append(RayProcess(None, cpus, 100 << 20))
        started[-1].start()

    yield start
    for ray_process in started:
        ray_process.stop()


class Sink:
    """An actor in the supervisor's place: keeps what workers tell it."""

    def __init__(self):
        self.messages = []

    def receive(self, attempt, message):
        self.messages.append(message)

    def all(self):
        return self.messages


class Other:
    """An actor that takes a processor."""

    def there(self):
        return True


class Watched:
    """What workers tell the sink."""

    def __init__(self):
        import ray

        self._ray, self.sink = ray, ray.remote(Sink).options(num_cpus=0).remote()

    def all(self):
        return self._ray.get(self.sink.all.remote())

    def steps_after(self, count):
        """Whether steps were measured since training began for this time."""
        messages = self.all()
        places = [place for place, message in enumerate(messages) if isinstance(message, TrainingStarted)]
        return len(places) >= count and len(losses_of(messages[places[count - 1] :])) >= 5

    def sizes(self):
        """How many workers there were of each group of several."""
        texts = [message.text for message in self.all() if isinstance(message, LogLine)]
        told = [text.rpartition(", ")[2] for text in texts if "parameters" in text]
        return [text for text in told if text.endswith("workers")]


def losses_of(messages):
    return [(message.step, message.values["loss"]) for message in messages if isinstance(message, Metrics)]


def losses_alone(config, home, steps):
    """What one worker finds in so many steps."""
    flag, messages = StopFlag(), []

    def send(message):
        messages.append(message)
        if isinstance(message, Metrics) and message.step == steps:
            flag.set(Stop.DISCARD)

    assignment = Assignment(job_id="alone", attempt=1, config=config.replace(workers=1, min_workers=None), home=home)
    assert isinstance(work(assignment, send, flag), Stopped)
    return losses_of(messages)


@pytest.fixture
def elastic(tmp_path, config, changed, words):
    """The config of a job with so many workers, and at least so many."""

    def make(workers, min_workers, batch_size):
        (tmp_path / "words.txt").write_text(words)
        asked = changed(
            config,
            data__dataset=str(tmp_path / "words.txt"),
            optimizer__steps=STEPS,
            evaluation__eval_steps=STEPS,
            workers=workers,
            min_workers=min_workers,
            optimizer__batch_size=batch_size,
        )
        return asked.replace(checkpoint=CheckpointConfig(save_steps=20))

    return make


def test_a_job_begins_with_fewer_workers_and_takes_more_when_there_is_room(
    tmp_path, ray_with, elastic, until, monkeypatch
):
    import ray

    monkeypatch.setattr(ray_group, "PLACED_SECONDS", 5.0)
    monkeypatch.setattr(ray_group, "GROW_SECONDS", 1.0)
    ray_with(3)
    asked = elastic(workers=3, min_workers=1, batch_size=6)
    others = [ray.remote(Other).options(num_cpus=1).remote() for _ in range(2)]
    assert ray.get([other.there.remote() for other in others]) == [True, True]
    watched, told, ended = Watched(), [], queue.SimpleQueue()
    group = ray_group.RayGroup(watched.sink, 1.0)
    group.begin(Assignment(job_id="job", attempt=1, config=asked, home=tmp_path, threads=1), told.append, ended.put)
    until(lambda: watched.steps_after(1), "one worker does not begin")
    assert "there is room for 1 of 3 workers; training continues with them" in [line.text for line in told]
    for count, other in enumerate(others, start=2):
        ray.kill(other)
        until(lambda count=count: watched.steps_after(count), f"{count} workers do not begin")
    group.stop(Stop.SAVE)
    assert ended.get(timeout=SECONDS) == Stopped(stop=Stop.SAVE)
    assert watched.sizes() == ["2 workers", "3 workers"]
    messages = watched.all()
    found = losses_of(messages)
    # Each began where a checkpoint of those before it was, and no step was left out or done twice.
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    assert next(message.step for message in messages if isinstance(message, TrainingStarted)) == 0
    same_as_alone(found, asked, tmp_path)


def same_as_alone(found, asked, home):
    """Whether losses are those of one worker, to what sums in another order differ by."""
    wanted = dict(losses_alone(asked, home, max(step for step, _ in found)))
    for step, loss in found:
        assert loss == pytest.approx(wanted[step], abs=1e-3 if step > 200 else 1e-5), step


def test_four_workers_of_which_one_is_lost_with_its_room_go_on_as_three(
    tmp_path, ray_with, elastic, until, monkeypatch
):
    import ray

    monkeypatch.setattr(ray_group, "PLACED_SECONDS", 5.0)
    ray_with(4)
    asked = elastic(workers=4, min_workers=3, batch_size=12)
    watched, told, ended = Watched(), [], queue.SimpleQueue()

    def begin(attempt):
        group = ray_group.RayGroup(watched.sink, 1.0)
        job = Assignment(job_id="job", attempt=attempt, config=asked, home=tmp_path, threads=1)
        group.begin(job, told.append, ended.put)
        return group

    begin(1)
    saved = tmp_path / "jobs" / "job" / "checkpoints"
    until(lambda: watched.steps_after(1) and CheckpointFolder(saved).complete(), "four workers do not begin")
    ranks = [p for p in psutil.Process().children(recursive=True) if "ray::RayRankActor" in " ".join(p.cmdline())]
    assert len(ranks) == 4
    os.kill(ranks[-1].pid, signal.SIGKILL)
    assert isinstance(ended.get(timeout=SECONDS), Lost)
    other = ray.remote(Other).options(num_cpus=1).remote()
    assert ray.get(other.there.remote(), timeout=SECONDS)
    group = begin(2)
    until(lambda: watched.steps_after(2), "three workers do not go on")
    group.stop(Stop.SAVE)
    assert ended.get(timeout=SECONDS) == Stopped(stop=Stop.SAVE)
    assert "there is room for 3 of 4 workers, which go on" in [line.text for line in told]
    assert watched.sizes() == ["4 workers", "3 workers"]
    messages = watched.all()
    begun = [message.step for message in messages if isinstance(message, TrainingStarted)]
    assert begun[0] == 0
    assert begun[1] >= 20
    assert begun[1] % 20 == 0
    found = losses_of(messages)
    assert {step for step, _ in found} == set(range(1, found[-1][0] + 1))
    same_as_alone(found, asked, tmp_path)
