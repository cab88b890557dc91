"""A supervisor brings a job to its end whatever its workers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from attn_core.errors import Unavailable
from attn_gateway.records import Database, Leases, database_url
from attn_schema.locks import exclusive
from attn_schema.training import JobError, JobState, LogLine, Metrics
from attn_train.attempt import Failed, Finished, Heartbeat, Lost, Stalled, Stopped, TrainingStarted
from attn_train.records import Stop
from attn_train.store import JobStore
from attn_train.supervisor import Supervisor, SupervisorSettings, supervisor_lease

LOST = Lost(error=JobError.of(Unavailable("killed")))


class Scripted:
    """A back end whose workers do as the script says: each is a function of the assignment, tell and stop event."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.attempts = []
        self.killed = 0

    def start(self, assignment, send, ended):
        self.attempts.append(assignment.attempt)
        script = self.scripts.pop(0)
        worker = ScriptedWorker(self)
        threading.Thread(target=lambda: ended(script(assignment, send, worker)), daemon=True).start()
        return worker


class ScriptedWorker:
    def __init__(self, backend):
        self.backend = backend
        self.asked = None
        self.stopped = threading.Event()

    def stop(self, stop):
        self.asked = stop
        self.stopped.set()

    def kill(self):
        self.backend.killed += 1


def finish(assignment, send, worker):
    send(TrainingStarted(step=0, checkpoint=None))
    send(Metrics(step=1, values={"loss": 1.0}))
    return Finished(model_path="/model")


def lose(assignment, send, worker):
    send(TrainingStarted(step=0, checkpoint=None))
    return LOST


def wait_for_stop(assignment, send, worker):
    send(TrainingStarted(step=0, checkpoint=None))
    worker.stopped.wait(60)
    return Stopped(stop=worker.asked)


@pytest.fixture
def job(tmp_path, config, changed):
    store = JobStore(Database(database_url(tmp_path)))
    store.submit("job", changed(config, max_failures=2))
    yield store
    store.close()


def supervise(tmp_path, backend, **settings):
    supervisor = Supervisor("job", backend, SupervisorSettings(home=tmp_path, poll=0.01, **settings))
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    return supervisor, thread


def test_a_lost_worker_is_replaced_and_the_next_attempt_finishes(tmp_path, job):
    backend = Scripted(lose, lose, finish)
    supervise(tmp_path, backend)[1].join(60)
    found = job.get("job")
    assert (found.state, found.attempt, found.failures, found.model_path) == (JobState.SUCCEEDED, 3, 2, "/model")
    assert backend.attempts == [1, 2, 3]


def test_one_loss_more_than_allowed_fails_the_job_with_its_reason(tmp_path, job):
    supervise(tmp_path, Scripted(lose, lose, lose))[1].join(60)
    found = job.get("job")
    assert (found.state, found.error) == (JobState.FAILED, LOST.error)


def test_workers_that_cannot_be_started_are_lost_ones(tmp_path, job):
    backend = Scripted(finish)
    started, tried = backend.start, []

    def crowded(assignment, send, ended):
        tried.append(assignment.attempt)
        if len(tried) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return started(assignment, send, ended)

    backend.start = crowded
    supervise(tmp_path, backend)[1].join(60)
    found = job.get("job")
    assert (found.state, found.failures, tried) == (JobState.SUCCEEDED, 2, [1, 2, 3])
    errors = [event.state_change.error for event in job.events("job", 0, 100) if event.state_change is not None]
    assert sum("Resource temporarily unavailable" in error.message for error in errors if error is not None) == 2


def test_an_error_of_the_job_itself_is_not_tried_again(tmp_path, job):
    error = JobError(reason="X", message="y")
    backend = Scripted(lambda *_: Failed(error=error))
    supervise(tmp_path, backend)[1].join(60)
    assert (job.get("job").state, job.get("job").error, backend.attempts) == (JobState.FAILED, error, [1])


def test_a_worker_that_does_not_stop_is_killed_after_its_shutdown_timeout(tmp_path, job):
    begun, silent = threading.Event(), threading.Event()

    def deaf(assignment, send, worker):
        begun.set()
        silent.wait(60)
        return LOST

    backend = Scripted(deaf)
    _, thread = supervise(tmp_path, backend, shutdown_timeout=0.05)
    assert begun.wait(60)
    job.request_stop("job", Stop.SAVE)
    thread.join(60)
    silent.set()
    assert (job.get("job").state, backend.killed) == (JobState.CANCELLED, 1)


def test_a_worker_that_falls_silent_is_killed_and_replaced(tmp_path, job):
    silent = threading.Event()

    def hang(assignment, send, worker):
        send(TrainingStarted(step=0, checkpoint=None))
        silent.wait(60)
        return LOST

    backend = Scripted(hang, finish)
    supervise(tmp_path, backend, stall_timeout=2.0)[1].join(60)
    silent.set()
    found = job.get("job")
    assert (found.state, found.failures, backend.killed) == (JobState.SUCCEEDED, 1, 1)


@pytest.mark.parametrize("left", [False, True])
def test_the_end_of_a_worker_that_hangs_names_what_it_is_in_but_not_what_it_has_left(tmp_path, config, changed, left):
    store, silent = JobStore(Database(database_url(tmp_path))), threading.Event()
    store.submit("job", changed(config, max_failures=0))

    def hang(assignment, send, worker):
        send(Heartbeat(doing="the reward 'slow'"))
        send(LogLine(text="a line in between"))
        if left:
            send(Heartbeat())
        silent.wait(60)
        return LOST

    supervise(tmp_path, Scripted(hang), stall_timeout=1.5)[1].join(60)
    silent.set()
    found = store.get("job")
    store.close()
    assert (found.state, "'slow'" in found.error.message) == (JobState.FAILED, not left)
    assert "1.5 seconds" in found.error.message


def test_a_worker_that_only_says_that_it_works_is_left_alone(tmp_path, job):
    def work_slowly(assignment, send, worker):
        for _ in range(60):
            send(Heartbeat())
            time.sleep(0.1)
        return finish(assignment, send, worker)

    backend = Scripted(work_slowly)
    supervise(tmp_path, backend, stall_timeout=5.0)[1].join(60)
    assert (job.get("job").state, backend.killed) == (JobState.SUCCEEDED, 0)


def test_a_worker_that_waits_for_a_free_processor_is_not_taken_for_stuck(tmp_path, job):
    def wait(assignment, send, worker):
        time.sleep(0.3)
        return finish(assignment, send, worker)

    backend = Scripted(wait)
    supervise(tmp_path, backend, stall_timeout=0.2)[1].join(60)
    assert (job.get("job").state, backend.killed) == (JobState.SUCCEEDED, 0)


def test_a_job_whose_workers_find_no_room_is_stalled_with_the_reason_and_not_taken_for_stuck(tmp_path, job):
    seen = []

    def wait(assignment, send, worker):
        send(Stalled(error=LOST.error))
        seen.append((job.get("job").state, job.get("job").error))
        time.sleep(0.3)
        return finish(assignment, send, worker)

    backend = Scripted(wait)
    supervise(tmp_path, backend, stall_timeout=0.2)[1].join(60)
    assert seen == [(JobState.STALLED, LOST.error)]
    assert (job.get("job").state, backend.killed) == (JobState.SUCCEEDED, 0)


def test_a_suspended_job_is_queued_and_its_worker_fenced(tmp_path, job):
    supervisor, thread = supervise(tmp_path, Scripted(wait_for_stop))
    supervisor.suspend()
    thread.join(60)
    found = job.get("job")
    assert (found.state, found.attempt, found.failures) == (JobState.QUEUED, 2, 0)
    other = Supervisor("job", Scripted(), SupervisorSettings(home=tmp_path))
    other.receive(1, LogLine(text="ghost"))
    assert job.get("job").last_event_id == found.last_event_id


def test_a_second_supervisor_leaves_the_job_to_the_first(tmp_path, job):
    backend = Scripted()
    with Leases(job.database).held(supervisor_lease("job")):
        supervise(tmp_path, backend)[1].join(60)
    assert (backend.attempts, job.get("job").state) == ([], JobState.QUEUED)


def test_a_job_found_at_work_without_a_supervisor_goes_on_under_a_new_attempt(tmp_path, job):
    job.change("job", 1, JobState.STARTING)
    job.change("job", 1, JobState.RUNNING)
    backend = Scripted(finish)
    supervise(tmp_path, backend)[1].join(60)
    assert backend.attempts == [2]
    assert (job.get("job").state, job.get("job").failures) == (JobState.SUCCEEDED, 0)


def test_a_cancel_that_nobody_heard_is_done_by_the_next_supervisor(tmp_path, job):
    job.change("job", 1, JobState.STARTING)
    job.request_stop("job", Stop.SAVE)
    backend = Scripted()
    supervise(tmp_path, backend)[1].join(60)
    assert (backend.attempts, job.get("job").state) == ([], JobState.CANCELLED)


@pytest.mark.parametrize("ending", [finish, lose, lambda *_: Failed(error=LOST.error)])
def test_a_stop_that_comes_while_the_worker_ends_leaves_the_job_final(tmp_path, job, ending):
    def end_after_stop(assignment, send, worker):
        job.request_stop("job", Stop.SAVE)
        return ending(assignment, send, worker)

    supervise(tmp_path, Scripted(end_after_stop))[1].join(60)
    assert job.get("job").state.final


def test_a_lock_is_free_once_its_holder_was_killed_and_not_before(tmp_path):
    path = tmp_path / "lock"
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from attn_schema.locks import exclusive
        with exclusive(Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(Unavailable, match="lock"), exclusive(path):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        with exclusive(path, wait=10):
            pass
