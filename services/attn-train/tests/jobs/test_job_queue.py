"""Jobs wait fairly, say for what, and leave for jobs of a higher priority."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attn_schema.training import JobState, TrainingConfig
from attn_train.job_queue import Room, scheduled
from attn_train.records import JobRecord

S = JobState


def job(number, owner="ann", priority=0, workers=1, state=S.QUEUED):
    config = TrainingConfig(workers=workers)
    return JobRecord(number=number, id=f"j{number}", owner=owner, priority=priority, config=config, state=state)


def needs(found):
    return Room(cpus=found.config.workers)


def plan(jobs, *, slots=1, cpus=8, weights=(), used=()):
    return scheduled(jobs, Room(jobs=slots, cpus=cpus), needs, dict(weights), dict(used))


def test_jobs_of_one_tenant_start_in_the_order_in_which_they_came():
    found = plan([job(3), job(1), job(2)], slots=2)
    assert found.start == ["j1", "j2"]
    assert list(found.waiting) == ["j3"]
    assert found.waiting["j3"] == "waits for a running job to end (ATTN_TRAIN_JOBS)"
    assert (found.position("j3"), found.position("j1")) == (1, 0)


def test_a_tenant_with_many_jobs_does_not_keep_out_one_with_few():
    many = [job(number) for number in range(1, 9)]
    found = plan([*many, job(9, "bob")], slots=2)
    assert found.start == ["j1", "j9"]
    # One at a time, the last day decides.
    assert plan([*many, job(9, "bob")], used={"ann": 60.0}).start == ["j9"]


def test_over_time_tenants_get_what_their_weights_say():
    weights, served, used = {"ann": 1.0, "bob": 3.0}, Counter(), Counter()
    jobs = [job(number, random.Random(number).choice(["ann", "bob"])) for number in range(1, 401)]
    for _ in range(120):
        (chosen,) = plan(jobs, weights=weights, used=used).start
        done = next(found for found in jobs if found.id == chosen)
        jobs.remove(done)
        served[done.owner] += 1
        used[done.owner] += 10.0
    assert served["bob"] == pytest.approx(3 * served["ann"], abs=4)


def test_a_job_that_does_not_fit_is_waited_for_and_one_that_never_fits_is_passed_over():
    running = job(1, workers=6, state=S.RUNNING)
    found = plan([running, job(2, workers=4), job(3), job(4, workers=9)], slots=9)
    assert found.start == []
    assert found.waiting == {
        "j2": "waits for 4 CPUs, of which 2 are free",
        "j3": "waits for the jobs before it",
        "j4": "the cluster is too small: 9 CPUs, of which 8 are free",
    }
    assert plan([job(2, workers=9), job(3)], slots=9).start == ["j3"]


def test_a_higher_priority_comes_first_and_takes_the_room_of_the_newest_of_the_lowest():
    working = [
        job(number, priority=priority, state=S.RUNNING) for number, priority in ((1, 0), (2, -5), (3, -5), (4, 2))
    ]
    found = plan([*working, job(5, priority=1), job(6, priority=-9)], slots=4)
    assert list(found.suspend) == ["j3"]
    assert "priority 1" in found.suspend["j3"]
    assert [*found.waiting] == ["j5", "j6"]
    assert not plan([*working, job(5, priority=-5)], slots=4).suspend


def test_nobody_leaves_where_that_would_not_make_enough_room():
    low, high = job(1, priority=-1, state=S.RUNNING), job(2, priority=5, workers=7, state=S.RUNNING)
    assert not plan([low, high, job(3, priority=3, workers=2)], slots=9).suspend
    assert plan([low, high, job(3, priority=3, workers=1)], slots=9, cpus=8).suspend == {
        "j1": "makes room for a job of priority 3"
    }


def test_a_job_that_leaves_already_is_not_asked_again_and_its_room_is_counted():
    leaving = job(1, priority=-1, state=S.CANCELLING)
    other = job(2, priority=-1, state=S.RUNNING)
    assert not plan([leaving, job(3, priority=1)]).suspend
    assert [*plan([leaving, other, job(3, priority=1), job(4, priority=1)], slots=2).suspend] in ([], ["j2"])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_submitted_runs_to_its_end_within_the_room(seed):
    draw = random.Random(seed)
    jobs = [job(n, draw.choice("abc"), draw.choice([-1, 0, 1]), draw.randint(1, 4)) for n in range(1, 13)]
    capacity, running, done = Room(jobs=3, cpus=5), set(), set()
    for _ in range(200):
        now = [found for found in jobs if found.id not in done]
        if not now:
            break
        seen = [
            JobRecord(
                number=found.number,
                id=found.id,
                owner=found.owner,
                priority=found.priority,
                config=found.config,
                state=S.RUNNING if found.id in running else S.QUEUED,
            )
            for found in now
        ]
        found = scheduled(seen, capacity, needs, {}, {})
        running -= set(found.suspend)
        running |= set(found.start)
        assert len(running) <= 3
        assert sum(item.config.workers for item in jobs if item.id in running) <= 5
        if not found.suspend and running:
            ended = draw.choice(sorted(running))
            running.remove(ended)
            done.add(ended)
    assert len(done) == 12
