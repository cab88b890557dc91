"""Records of jobs keep their order, their fences and their states."""

from __future__ import annotations

import json
import threading

import pytest
from attn_core.errors import AlreadyExists, OutOfCapacity, UnknownName, WrongState
from attn_gateway.records import Database
from attn_gateway.records.tables import events, jobs
from attn_schema.training import Checkpoint, JobError, JobState, LogLine, Metrics, StateChange
from attn_train.divergence import TrainingDiverged
from attn_train.records import TRANSITIONS, Stop
from attn_train.store import JobStore, Superseded
from sqlalchemy import select, update

S = JobState


@pytest.fixture
def store(url):
    opened = JobStore(Database(url))
    yield opened
    opened.close()


def running(store, config, job_id="job"):
    job = store.submit(job_id, config)
    store.change(job.id, job.attempt, S.STARTING)
    return store.change(job.id, job.attempt, S.RUNNING)


def test_a_job_is_read_back_as_it_was_written(store, config, changed):
    config = changed(config, model__options={"window": 4, "nested": {"a": [1, 2.5, "x"]}}, seed=2**63)
    job = store.submit("job", config)
    assert (job.id, job.state, job.attempt, job.last_event_id) == ("job", S.QUEUED, 1, 0)
    assert store.get("job") == job
    assert store.get("job").config == config


def test_everything_is_there_for_another_process_and_after_a_restart(store, url, config):
    job = running(store, config)
    store.append(job.id, 1, [Metrics(step=3, values={"loss": 0.1 + 0.2})])
    other = JobStore(Database(url))
    assert other.get("job") == store.get("job")
    assert other.events("job", 0, 100) == store.events("job", 0, 100)
    other.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_metric_that_is_not_finite_is_read_back_and_stored_as_json(store, config, value):
    running(store, config)
    store.append("job", 1, [Metrics(step=1, values={"loss": 1.5, "gradient_norm": value})])
    assert repr(store.events("job", 0, 100)[-1].metrics.values) == repr({"gradient_norm": value, "loss": 1.5})
    assert repr(store.get("job").last_metrics) == repr({"gradient_norm": value, "loss": 1.5})
    with store.database.reading() as connection:
        texts = [
            *connection.execute(select(events.c.payload)).scalars(),
            *connection.execute(select(jobs.c.metrics)).scalars(),
        ]
    for text in texts:
        json.loads(text, parse_constant=pytest.fail)


def test_metrics_that_earlier_versions_wrote_are_read(store, config):
    running(store, config)
    store.append("job", 1, [Metrics(step=1, values={"loss": 1.5})])
    with store.database.writing() as connection:
        connection.execute(
            update(events).where(events.c.kind == "metrics").values(payload='{"step":1,"values":{"a":null}}')
        )
        connection.execute(update(jobs).values(metrics='{"a": NaN, "b": 1}'))
    assert repr(store.events("job", 0, 100)[-1].metrics.values) == "{'a': nan}"
    assert repr(store.get("job").last_metrics) == "{'a': nan, 'b': 1.0}"


def test_ids_count_from_one_without_gaps_also_from_many_threads(store, config):
    running(store, config)
    before = store.get("job").last_event_id

    def write(worker):
        for _ in range(25):
            store.append("job", 1, [LogLine(text=str(worker)), LogLine(text=str(worker))])

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = store.events("job", 0, 1000)
    assert [event.id for event in events] == list(range(1, before + 201))
    assert store.get("job").last_event_id == before + 200
    assert store.events("job", before + 195, 3) == events[before + 195 : before + 198]


def test_every_kind_of_event_is_read_back_as_it_was_written(store, config):
    running(store, config)
    error = JobError.of(OutOfCapacity("no room", retry_seconds=3))
    payloads = [
        LogLine(text='a "line"'),
        Metrics(step=1, values={"loss": 1.5}),
        Checkpoint(step=1, path="/x", size_bytes=10),
    ]
    store.append("job", 1, payloads)
    store.change("job", 1, S.FAILED, error=error)
    found = [event.payload for event in store.events("job", 2, 10)]
    assert found == [*payloads, StateChange(previous=S.RUNNING, current=S.FAILED, error=error)]
    assert store.get("job").latest_checkpoint == payloads[2]


def test_the_newest_value_of_each_metric_stays(store, config):
    running(store, config)
    store.append("job", 1, [Metrics(step=1, values={"loss": 3.0, "validation_loss": 2.0})])
    store.append("job", 1, [Metrics(step=2, values={"loss": 1.0})])
    assert store.get("job").last_metrics == {"loss": 1.0, "validation_loss": 2.0}
    assert store.get("job").step == 2


def test_an_attempt_that_was_replaced_can_write_nothing(store, config):
    running(store, config)
    store.next_attempt("job", 1, lost=True)
    before = store.get("job")
    assert (before.attempt, before.failures, before.state) == (2, 1, S.RECOVERING)
    for write in (
        lambda: store.append("job", 1, [LogLine(text="ghost")]),
        lambda: store.change("job", 1, S.SUCCEEDED),
        lambda: store.begin("job", 1, 5, None),
        lambda: store.next_attempt("job", 1),
        lambda: store.suspend("job", 1),
    ):
        with pytest.raises(Superseded):
            write()
    assert store.get("job") == before


def test_a_final_job_takes_no_more_events(store, config):
    running(store, config)
    store.change("job", 1, S.SUCCEEDED, model_path="/m")
    with pytest.raises(Superseded):
        store.append("job", 1, [LogLine(text="late")])
    assert store.get("job").model_path == "/m"


def test_only_states_that_may_follow_do_and_a_refused_change_leaves_no_trace(store, config):
    for number, (current, allowed) in enumerate(TRANSITIONS.items()):
        for following in S:
            job = store.submit(f"{number}-{following}", config)
            with store.database.writing() as connection:
                connection.execute(update(jobs).where(jobs.c.id == job.id).values(state=current))
            if following in allowed:
                assert store.change(job.id, 1, following).state is following
            else:
                with pytest.raises(WrongState):
                    store.change(job.id, 1, following)
                assert store.get(job.id).state is current
                assert store.events(job.id, 0, 10) == []


def test_a_stop_is_recorded_once_and_only_made_stronger(store, config):
    running(store, config)
    assert store.request_stop("job", Stop.SAVE).stop is Stop.SAVE
    assert store.request_stop("job", Stop.DISCARD).stop is Stop.DISCARD
    assert store.request_stop("job", Stop.SAVE).stop is Stop.DISCARD
    changes = [e.payload for e in store.events("job", 0, 10) if isinstance(e.payload, StateChange)]
    assert [change.current for change in changes].count(S.CANCELLING) == 1


def test_only_failed_and_cancelled_jobs_are_queued_again(store, config):
    running(store, config)
    with pytest.raises(WrongState, match="running"):
        store.requeue("job")
    store.change("job", 1, S.FAILED, error=JobError.of(TrainingDiverged("nan", step=3)))
    job = store.requeue("job")
    assert (job.state, job.attempt, job.error, job.end_time) == (S.QUEUED, 2, None, None)
    store.change("job", 2, S.STARTING)
    store.change("job", 2, S.SUCCEEDED)
    with pytest.raises(WrongState, match="succeeded"):
        store.requeue("job")


def test_an_equal_submission_is_the_same_job_and_another_one_is_refused(store, config, changed):
    first = store.submit("job", config)
    assert store.submit("job", config) == first
    with pytest.raises(AlreadyExists):
        store.submit("job", changed(config, seed=99))
    assert [job.id for job in store.page(None, 10)] == ["job"]


def test_pages_are_newest_first_and_unfinished_jobs_oldest_first(store, config):
    for name in ("a", "b", "c"):
        running(store, config, name)
    store.change("b", 1, S.SUCCEEDED)
    assert [job.id for job in store.page(None, 2)] == ["c", "b"]
    assert [job.id for job in store.page(store.get("b").number, 2)] == ["a"]
    assert [job.id for job in store.unfinished()] == ["a", "c"]


def test_an_unknown_job_is_named_with_near_ones(store, config):
    store.submit("gqa-1", config)
    with pytest.raises(UnknownName, match="gqa-1"):
        store.get("gqa-2")


@pytest.mark.parametrize("error", [OutOfCapacity("full", retry_seconds=2), TrainingDiverged("nan", step=3)])
def test_an_error_comes_back_as_the_class_it_was(error):
    again = JobError.of(error).error()
    assert type(again) is type(error)
    assert (again.message, again.metadata, again.reason) == (error.message, error.metadata, error.reason)


def test_an_error_of_a_reason_nobody_knows_keeps_its_message():
    assert JobError(reason="FROM_THE_FUTURE", message="m").error().message == "m"


def test_a_job_belongs_to_its_tenant_and_is_unknown_to_others(store, config, changed):
    store.submit("anns", config, "ann")
    store.submit("bobs", config, "bob")
    store.submit("everybodys", config)
    assert [job.id for job in store.page(None, 10, "ann")] == ["everybodys", "anns"]
    assert [job.id for job in store.page(None, 10)] == ["everybodys", "bobs", "anns"]
    for ask in (
        lambda: store.get("bobs", "ann"),
        lambda: store.request_stop("bobs", Stop.SAVE, "ann"),
        lambda: store.requeue("bobs", "ann"),
    ):
        with pytest.raises(UnknownName) as caught:
            ask()
        assert "did you mean 'bobs'" not in caught.value.message
    with pytest.raises(AlreadyExists):
        store.submit("bobs", config, "ann")
    assert store.get("bobs", "bob").stop is None
    assert store.get("everybodys", "ann").owner == ""
