"""A job goes on with the workers that there is room for: fewer at first, more when there is room, the same losses."""

from __future__ import annotations

import queue
import time

import pytest
from attn_gateway.ray_process import RayProcess
from attn_schema.training import CheckpointConfig, LogLine, Metrics
from attn_train import ray_group
from attn_train.attempt import Assignment, Stopped, TrainingStarted
from attn_train.records import Stop, StopFlag
from attn_train.worker import work

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SECONDS = 300
STEPS = 1_000_000
"""More than there is time for: the job is stopped."""


@pytest.fixture
def three_cpus():
    ray_process = RayProcess(None, 3, 100 << 20)
    ray_process.start()
    yield
    ray_process.stop()


def until(condition, what):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


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


def test_a_job_begins_with_fewer_workers_and_takes_more_when_there_is_room(
    tmp_path, three_cpus, config, changed, words, monkeypatch
):
    import ray

    class Sink:
        def __init__(self):
            self.messages = []

        def receive(self, attempt, message):
            self.messages.append(message)

        def all(self):
            return self.messages

    class Other:
        def there(self):
            return True

    monkeypatch.setattr(ray_group, "PLACED_SECONDS", 5.0)
    monkeypatch.setattr(ray_group, "GROW_SECONDS", 1.0)
    (tmp_path / "words.txt").write_text(words)
    asked = changed(
        config,
        data__dataset=str(tmp_path / "words.txt"),
        optimizer__steps=STEPS,
        evaluation__eval_steps=STEPS,
        workers=3,
        min_workers=1,
        optimizer__batch_size=6,
    ).replace(checkpoint=CheckpointConfig(save_steps=20))
    sink = ray.remote(Sink).options(num_cpus=0).remote()
    others = [ray.remote(Other).options(num_cpus=1).remote() for _ in range(2)]
    assert ray.get([other.there.remote() for other in others]) == [True, True]
    told, ended = [], queue.SimpleQueue()
    group = ray_group.RayGroup(sink, 1.0)
    group.begin(Assignment(job_id="job", attempt=1, config=asked, home=tmp_path, threads=1), told.append, ended.put)

    def begun():
        return [message for message in ray.get(sink.all.remote()) if isinstance(message, TrainingStarted)]

    def steps_after(count):
        """Whether steps were measured since the training began for this time."""
        messages = ray.get(sink.all.remote())
        places = [place for place, message in enumerate(messages) if isinstance(message, TrainingStarted)]
        return len(places) >= count and len(losses_of(messages[places[count - 1] :])) >= 5

    until(lambda: steps_after(1), "one worker does not begin")
    assert "there is room for 1 of 3 workers, which go on" in [line.text for line in told]
    for count, other in enumerate(others, start=2):
        ray.kill(other)
        until(lambda count=count: steps_after(count), f"{count} workers do not begin")
    group.stop(Stop.SAVE)
    outcome = ended.get(timeout=SECONDS)
    assert outcome == Stopped(stop=Stop.SAVE)
    messages = ray.get(sink.all.remote())
    texts = [message.text for message in messages if isinstance(message, LogLine)]
    assert [text.rpartition(", ")[2] for text in texts if "parameters" in text][1:] == ["2 workers", "3 workers"]
    found = losses_of(messages)
    # Each began where a checkpoint of those before it was, and no step was left out or done twice.
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    assert next(message.step for message in begun()) == 0
    wanted = losses_alone(asked, tmp_path, len(found))
    for (step, loss), (_, of_one) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(of_one, abs=1e-3 if step > 200 else 1e-5), step
