"""A full disk, a lost database and a lost artefact store stall a job: nothing is lost, and it goes on by itself."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
from attn_core.errors import Unavailable
from attn_gateway.records import ArtifactStore, Database, Leases, database_url
from attn_schema.training import JobError, JobState, Metrics
from attn_train import object_checkpoints, stalls
from attn_train.attempt import Finished, TrainingStarted
from attn_train.checkpoint import CheckpointFolder
from attn_train.object_checkpoints import checkpoints_of
from attn_train.settings import Layout
from attn_train.store import JobStore
from attn_train.supervisor import Supervisor, SupervisorSettings, supervisor_lease
from s3_server import bucket_server
from thread_workers import ThreadBackend

SECONDS = 60
STORE = "s3://bucket/prefix"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """New tries come soon, so that the tests are quick."""
    monkeypatch.setattr(stalls, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(stalls, "LONGEST_WAIT", 0.2)


def until(condition, what):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def words_file(tmp_path, words):
    path = tmp_path / "words.txt"
    path.write_text(words)
    return path


@pytest.fixture
def supervise(tmp_path, config, changed, words_file):
    """Supervise a job of thirty steps in threads; gives its store, the supervisor and its thread."""
    started = []

    def start(home, backend=None, *, database=None, **settings):
        url = database or database_url(home)
        store = JobStore(Database(url))
        store.submit("job", changed(config, data__dataset=str(words_file), max_failures=0))
        told = SupervisorSettings(home=home, database=url, poll=0.02, **settings)
        supervisor = Supervisor("job", backend or ThreadBackend(), told)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()
        started.append((store, thread))
        return store, supervisor, thread

    yield start
    for store, thread in started:
        thread.join(SECONDS)
        store.close()


def history(store):
    """The states that a job went through, and the losses at its steps; events count from 1 without gaps."""
    found = store.events("job", 0, 1000)
    assert [event.id for event in found] == list(range(1, len(found) + 1))
    states = [event.state_change.current for event in found if event.state_change]
    losses = [(e.metrics.step, e.metrics.values["loss"]) for e in found if e.metrics and "loss" in e.metrics.values]
    return states, losses


def test_a_full_disk_stalls_the_job_until_there_is_room_and_the_losses_are_those_of_an_undisturbed_run(
    tmp_path, small_disk, supervise, fill
):
    undisturbed, _, thread = supervise(tmp_path / "other")
    thread.join(SECONDS)
    wanted = history(undisturbed)[1]
    fill(small_disk)
    store, _, thread = supervise(small_disk, database=f"sqlite:///{tmp_path / 'records.sqlite3'}")
    until(lambda: store.get("job").state is JobState.STALLED or not thread.is_alive(), "the job does not stall")
    stalled = store.get("job")
    assert (stalled.state, stalled.error.reason) == (JobState.STALLED, "CHECKPOINT_WRITE_FAILED")
    assert "No space left" in stalled.error.message
    (small_disk / "filler").unlink()
    thread.join(SECONDS)
    done = store.get("job")
    assert (done.state, done.attempt, done.failures, done.error) == (JobState.SUCCEEDED, 1, 0, None)
    states, losses = history(store)
    assert states == ["starting", "running", "stalled", "running", "succeeded"]
    assert losses == wanted
    assert CheckpointFolder(Layout(small_disk).checkpoints("job")).newest().step == 30


class Paused(ThreadBackend):
    """Threads whose worker waits after its third step until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def start(self, assignment, send, ended):
        def paused(message):
            send(message)
            if isinstance(message, Metrics) and message.step == 3:
                self.reached.set()
                self.go_on.wait(SECONDS)

        self.worker = super().start(assignment, paused, ended)
        return self.worker


def stands_still(store, seconds=1.0):
    """Wait until the job's step has been the same for so long; gives the step."""
    step, since = store.get("job").step, time.monotonic()

    def same():
        nonlocal step, since
        if (now := store.get("job").step) != step:
            step, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    until(same, "the job does not stand still")
    return step


def test_a_disk_that_holds_the_database_too_loses_no_measurement_when_it_is_full(tmp_path, small_disk, supervise, fill):
    undisturbed, _, thread = supervise(tmp_path / "other")
    thread.join(SECONDS)
    wanted = history(undisturbed)[1]
    backend = Paused()
    store, _, thread = supervise(small_disk, backend)
    until(backend.reached.is_set, "the job does not begin")
    fill(small_disk)
    backend.go_on.set()
    assert stands_still(store) < wanted[-1][0]
    assert thread.is_alive()
    (small_disk / "filler").unlink()
    thread.join(SECONDS)
    done = store.get("job")
    assert (done.state, done.attempt, done.failures) == (JobState.SUCCEEDED, 1, 0)
    assert history(store)[1] == wanted


def test_a_job_that_is_stalled_can_be_cancelled(tmp_path, small_disk, supervise, fill):
    from attn_train.records import Stop

    fill(small_disk)
    store, _, thread = supervise(small_disk, database=f"sqlite:///{tmp_path / 'records.sqlite3'}")
    until(lambda: store.get("job").state is JobState.STALLED, "the job does not stall")
    store.request_stop("job", Stop.SAVE)
    thread.join(SECONDS)
    assert store.get("job").state is JobState.CANCELLED


@pytest.fixture
def bucket(monkeypatch):
    """A bucket, which jobs find at `STORE`; a store that fails is told at once."""
    monkeypatch.setattr(object_checkpoints, "PATIENCE", {"max_retries": 0})
    with bucket_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_store_that_is_away_stalls_the_job_before_it_begins_and_at_its_end(tmp_path, bucket, supervise):
    undisturbed, _, thread = supervise(tmp_path / "other")
    thread.join(SECONDS)
    wanted = history(undisturbed)[1]
    bucket.answers = False
    backend = Paused()
    store, _, thread = supervise(tmp_path / "home", backend, artifacts=STORE)
    until(lambda: store.get("job").state is JobState.STALLED, "the job does not stall")
    assert store.get("job").error.reason == "UNAVAILABLE"
    assert f"artefact store {STORE}" in store.get("job").error.message
    bucket.answers = True
    until(backend.reached.is_set, "the job does not begin")
    bucket.answers = False
    backend.go_on.set()
    until(lambda: store.get("job").state is JobState.STALLED, "the job does not stall")
    assert store.get("job").error.reason == "CHECKPOINT_WRITE_FAILED"
    assert store.get("job").step == 30
    bucket.answers = True
    thread.join(SECONDS)
    done = store.get("job")
    assert (done.state, done.attempt, done.failures, done.error) == (JobState.SUCCEEDED, 1, 0, None)
    states, losses = history(store)
    assert states == ["starting", "stalled", "running", "stalled", "running", "succeeded"]
    assert losses == wanted
    assert done.latest_checkpoint.path == f"{STORE}/checkpoints/job/step-000000030"
    assert not Layout(tmp_path / "home").checkpoints("job").exists()


def test_another_machine_goes_on_with_a_job_without_a_shared_folder(tmp_path, bucket, supervise):
    undisturbed, _, thread = supervise(tmp_path / "other")
    thread.join(SECONDS)
    backend = Paused()
    url = f"sqlite:///{tmp_path / 'records.sqlite3'}"
    store, supervisor, thread = supervise(tmp_path / "here", backend, database=url, artifacts=STORE)
    until(backend.reached.is_set, "the job does not begin")
    supervisor.suspend()
    until(lambda: backend.worker.flag.get() is not None, "the worker is not asked to stop")
    backend.go_on.set()
    thread.join(SECONDS)
    assert store.get("job").state is JobState.QUEUED
    before = store.get("job").step
    shutil.rmtree(tmp_path / "here")
    told = SupervisorSettings(home=tmp_path / "there", database=url, artifacts=STORE, poll=0.02)
    Supervisor("job", ThreadBackend(), told).run()
    assert store.get("job").state is JobState.SUCCEEDED
    assert history(store)[1] == history(undisturbed)[1]
    assert store.get("job").step == 30 > before
    fetched = ArtifactStore(STORE, tmp_path / "cache").fetch("job")
    assert (fetched / "model.safetensors").is_file()
    checkpoints_of("job", tmp_path / "there", STORE).remove()
    assert not [name for name in bucket.objects if "checkpoints/" in name]


class Sending:
    """A back end whose worker tells of ten steps, and takes the database away after the third."""

    def __init__(self, lose):
        self.lose = lose
        self.sent = 0

    def start(self, assignment, send, ended):
        def run():
            send(TrainingStarted(step=0, checkpoint=None))
            for step in range(1, 11):
                send(Metrics(step=step, values={"loss": float(step)}))
                self.sent = step
                if step == 3:
                    self.lose()
            ended(Finished(model_path="/model"))

        threading.Thread(target=run, daemon=True).start()
        return Killable()


class Killable:
    def stop(self, stop):
        pass

    def kill(self):
        raise AssertionError("a worker that waits for the database is not stuck")


def test_a_postgresql_that_is_away_for_a_while_loses_nothing(tmp_path, postgres, supervise, monkeypatch, request):
    from attn_gateway.records import database

    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    postgres.execute("CREATE DATABASE away")
    url = postgres.url.replace("/postgres?", "/away?")
    backend = Sending(postgres.stop)
    try:
        store, _, thread = supervise(tmp_path, backend, database=url, stall_timeout=1.0)
        until(lambda: backend.sent == 3, "the worker does not begin")
        time.sleep(2.5)
        assert backend.sent == 3
        assert thread.is_alive()
    finally:
        postgres.start()
    thread.join(SECONDS)
    assert store.get("job").state is JobState.SUCCEEDED
    assert history(store) == (["starting", "running", "succeeded"], [(step, float(step)) for step in range(1, 11)])


def test_a_sqlite_file_that_is_moved_away_and_back_loses_nothing(tmp_path, supervise):
    names = [f"records.sqlite3{end}" for end in ("", "-wal", "-shm")]
    aside = tmp_path / "aside"
    aside.mkdir()

    def move_away():
        for name in names:
            if (tmp_path / name).exists():
                (tmp_path / name).rename(aside / name)

    backend = Sending(move_away)
    _, _, thread = supervise(tmp_path, backend)
    until(lambda: backend.sent >= 3, "the worker does not begin")
    time.sleep(0.5)
    for name in names:
        if (aside / name).exists():
            (aside / name).replace(tmp_path / name)
    thread.join(SECONDS)
    with Database(database_url(tmp_path)) as again:
        assert JobStore(again).get("job").state is JobState.SUCCEEDED
        assert history(JobStore(again))[1] == [(step, float(step)) for step in range(1, 11)]


def finishing(folder):
    class Finishing(Sending):
        def __init__(self):
            super().__init__(lambda: None)

        def start(self, assignment, send, ended):
            send(TrainingStarted(step=0, checkpoint=None))
            threading.Thread(target=lambda: ended(Finished(model_path=str(folder)))).start()
            return Killable()

    return Finishing()


def test_a_model_is_published_once_the_artefact_store_is_there(tmp_path, supervise):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    place = tmp_path / "artefacts"
    place.write_text("a file where the folder of the store should be")
    store, _, thread = supervise(tmp_path, finishing(model), artifacts=f"file://{place}")
    until(lambda: store.get("job").state is JobState.STALLED, "the job does not stall")
    assert store.get("job").error.reason == "UNAVAILABLE"
    assert "artefact store" in store.get("job").error.message
    place.unlink()
    thread.join(SECONDS)
    assert store.get("job").state is JobState.SUCCEEDED
    fetched = ArtifactStore(f"file://{place}", tmp_path / "cache").fetch("job")
    assert (fetched / "config.json").read_text() == "{}"


def test_a_job_of_which_nothing_is_recorded_is_shown_as_stalled(tmp_path, config):
    with Database(database_url(tmp_path)) as database:
        store = JobStore(database)
        store.submit("job", config)
        store.change("job", 1, JobState.STARTING)
        leases = Leases(database)
        assert store.unattended_seconds(["job"]) == {}
        lease = leases.acquire(supervisor_lease("job"), seconds=0.05)
        time.sleep(0.3)
        assert 0 < store.unattended_seconds(["job"])["job"] < SECONDS
        leases.renew(lease)
        assert store.unattended_seconds(["job"]) == {}
        leases.release(lease)
        assert store.unattended_seconds(["job"]) == {}


def test_the_error_of_a_stall_is_gone_once_the_job_goes_on(tmp_path, config):
    with Database(database_url(tmp_path)) as database:
        store = JobStore(database)
        store.submit("job", config)
        store.change("job", 1, JobState.STARTING)
        store.begin("job", 1, 0, None)
        error = JobError.of(Unavailable("full"))
        store.stall("job", 1, error)
        store.stall("job", 1, JobError.of(Unavailable("still full")))
        assert (store.get("job").state, store.get("job").error) == (JobState.STALLED, error)
        store.go_on("job", 1)
        store.go_on("job", 1)
        assert (store.get("job").state, store.get("job").error) == (JobState.RUNNING, None)
        assert history(store)[0] == ["starting", "running", "stalled", "running"]


def test_waits_grow_to_the_longest_and_stop_when_nobody_wants_to_wait():
    found = stalls.waits()
    assert [round(next(found), 3) for _ in range(4)] == [0.05, 0.1, 0.2, 0.2]
    tries = []

    def fail():
        tries.append(1)
        raise Unavailable("away", database="x")

    pause = stalls.pausing(lambda: len(tries) < 3)
    with pytest.raises(Unavailable):
        stalls.with_retries(fail, lambda _: None, retryable=stalls.is_database_error, pause=pause)
    assert len(tries) == 3
    with pytest.raises(Unavailable):
        stalls.with_retries(fail, lambda _: None, retryable=stalls.is_disk_error)
    assert len(tries) == 4
