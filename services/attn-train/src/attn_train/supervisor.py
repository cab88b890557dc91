"""The supervisor of one job: it starts workers, records their messages, and replaces lost workers."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from attn_core.errors import AttnError, Unavailable, WrongState
from attn_gateway.records import ArtifactStore, Database, Leases, ModelRecord, ModelRecords, database_url
from attn_schema.training import Checkpoint, JobError, JobState, LogLine, Metrics

from attn_train.attempt import (
    Assignment,
    Backend,
    Failed,
    Finished,
    Heartbeat,
    Lost,
    Message,
    Outcome,
    Resumed,
    Stalled,
    Stopped,
    TrainingStarted,
    Worker,
)
from attn_train.job_metrics import JobMetrics
from attn_train.records import JobRecord, Stop
from attn_train.settings import Layout
from attn_train.stalls import is_database_error, is_store_error, pausing, with_retries
from attn_train.store import JobStore, Superseded, supervisor_lease


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """Settings of a supervisor.

    `poll` is the interval in seconds between reads of the record. A worker that was asked to stop is killed after
    `shutdown_timeout` seconds; one that sends nothing for `stall_timeout` seconds is killed and replaced. On a CUDA
    device, a worker takes `gpus` of a GPU, such as 1 or 0.5. `database` is the URL of the records; None means
    that of the environment or home. With `artifacts`, a URL, checkpoints are kept there, and finished models are
    published there for servers on other machines. With `log_to` "wandb", metrics are also written to a W&B run.
    """

    home: Path
    database: str | None = None
    artifacts: str | None = None
    threads: int | None = None
    poll: float = 0.5
    shutdown_timeout: float = 60.0
    stall_timeout: float = 600.0
    gpus: float = 1.0
    log_to: str | None = None


CHECK_NOW = None
SERVER_STOPS = "the server is shutting down; the job continues when it starts again"

Recorded: TypeAlias = TrainingStarted | Metrics | Checkpoint | LogLine | Stalled | Resumed
"""The messages of a worker that are recorded."""
Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Supervisor:
    """Runs one job from its recorded state to its end. All persistent state is in the record."""

    def __init__(self, job_id: str, backend: Backend, settings: SupervisorSettings) -> None:
        self.job_id = job_id
        self._backend = backend
        self._settings = settings
        self._store = JobStore(Database(settings.database or database_url(settings.home)))
        self._inbox: queue.SimpleQueue[tuple[int, Outcome] | None] = queue.SimpleQueue()
        self._suspended = False
        self._why = SERVER_STOPS
        self._claimed = False
        self._last_message: tuple[int, float] | None = None
        self._doing = ""
        self._metrics: JobMetrics | None = None

    def run(self) -> None:
        """Supervise until the job is final or suspended; returns at once if another supervisor has the job.

        Must be called only once.
        """
        try:
            with ExitStack() as held:
                leases, name = Leases(self._store.database), supervisor_lease(self.job_id)
                self._with_database(lambda: held.enter_context(leases.held(name)))
                try:
                    while self._attempt():
                        pass
                finally:
                    self._close_metrics()
        except (Unavailable, Superseded):
            # Another supervisor has taken over the job.
            return
        finally:
            self._store.close()

    def check_now(self) -> None:
        """Make the supervisor read the record now."""
        self._inbox.put(CHECK_NOW)

    def suspend(self, why: str = SERVER_STOPS) -> None:
        """Stop the worker with a checkpoint and put the job back into the queue; `why` is written to its log."""
        self._why = why
        self._suspended = True
        self.check_now()

    def receive(self, attempt: int, message: Message) -> None:
        """Record a message of the worker of `attempt`; messages of older attempts are dropped."""
        # These two may also be sent by the backend, before a worker has begun, for example while it waits for room.
        if not isinstance(message, LogLine | Stalled):
            self._last_message = attempt, time.monotonic()
        if isinstance(message, Heartbeat):
            self._doing = message.doing
            return
        try:
            self._with_database(lambda: self._record(attempt, message))
        except Superseded:
            return
        finally:
            # A worker that had to wait here for the database does not count as stuck.
            if self._last_message is not None:
                self._last_message = self._last_message[0], time.monotonic()

    def _record(self, attempt: int, message: Recorded) -> None:
        if isinstance(message, TrainingStarted):
            self._store.begin(self.job_id, attempt, message.step, message.checkpoint)
        elif isinstance(message, Stalled):
            self._store.stall(self.job_id, attempt, message.error)
        elif isinstance(message, Resumed):
            self._store.go_on(self.job_id, attempt)
        else:
            self._store.append(self.job_id, attempt, [message])

    def _with_database(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which needs the database; it is retried until the database is available, so that
        nothing is lost while it is not."""

        def log_wait(error: AttnError) -> None:
            log.warning("job %s waits: %s", self.job_id, error.message)
            if self._last_message is not None:
                self._last_message = self._last_message[0], time.monotonic()

        return with_retries(work, log_wait, retryable=is_database_error)

    def _attempt(self) -> bool:
        """Run one attempt; return whether another one is to follow."""
        job = self._with_database(lambda: _retried(lambda: self._begin(self._store.get(self.job_id))))
        if job.state.final:
            return False
        assignment = Assignment(
            job_id=job.id,
            attempt=job.attempt,
            config=job.config,
            home=self._settings.home,
            threads=self._settings.threads,
            artifacts=self._settings.artifacts,
            owner=job.owner,
        )
        outcome = self._run_attempt(assignment)
        published = isinstance(outcome, Finished) and self._publish(job, outcome.model_path)
        if isinstance(outcome, Finished) and not published and self._suspended:
            # The next attempt starts at the last step and only publishes the model.
            outcome = Stopped(stop=Stop.SAVE)
        # Before the job ends, after which its folder may be deleted at any time.
        self._write_metrics()
        self._close_metrics()
        return self._with_database(lambda: _retried(lambda: self._conclude(job.attempt, outcome)))

    def _run_attempt(self, assignment: Assignment) -> Outcome:
        """Start the workers of an attempt and return their outcome; workers that cannot be started are lost ones."""
        attempt, self._doing = assignment.attempt, ""
        try:
            worker = self._backend.start(
                assignment,
                lambda message: self.receive(attempt, message),
                lambda outcome: self._inbox.put((attempt, outcome)),
            )
        except (OSError, Unavailable) as error:
            return Lost(error=JobError.of(Unavailable(f"the workers could not be started: {error}")))
        return self._outcome(attempt, worker)

    def _begin(self, job: JobRecord) -> JobRecord:
        if job.state is JobState.CANCELLING:
            return self._store.change(job.id, job.attempt, JobState.CANCELLED)
        begun = job
        if job.state is JobState.QUEUED:
            begun = self._store.change(job.id, job.attempt, JobState.STARTING)
        elif not self._claimed and not job.state.final:
            # The job was running without a supervisor: a worker of that attempt must not write any more.
            error = JobError.of(Unavailable("the server or the machine was lost"))
            begun = self._store.next_attempt(job.id, job.attempt, error)
        self._claimed = True
        return begun

    def _outcome(self, attempt: int, worker: Worker) -> Outcome:
        """Wait until the worker ends, and forward requests to stop."""
        forwarded: Stop | None = None
        deadline = float("inf")
        while True:
            try:
                item = self._inbox.get(timeout=self._settings.poll)
            except queue.Empty:
                item = CHECK_NOW
            if item is not None and item[0] == attempt:
                return item[1]
            self._write_metrics()
            stop = self._requested_stop()
            if stop is not None and stop is not forwarded:
                worker.stop(stop)
                forwarded = stop
                deadline = min(deadline, time.monotonic() + self._settings.shutdown_timeout)
            if time.monotonic() > deadline:
                worker.kill()
                return Stopped(stop=Stop.DISCARD)
            if self._is_stuck(attempt):
                worker.kill()
                seconds = f"{self._settings.stall_timeout:g} seconds"
                silent = f"{self._doing} did not return for" if self._doing else "the worker sent nothing for"
                return Lost(error=JobError.of(Unavailable(f"{silent} {seconds}")))

    def _write_metrics(self) -> None:
        """Export new metrics from the job's records."""
        try:
            if self._metrics is None:
                folder = Layout(self._settings.home).job(self.job_id)
                self._metrics = JobMetrics(self._store.get(self.job_id), folder, self._settings.log_to)
            self._metrics.catch_up(lambda after, count: self._store.events(self.job_id, after, count))
        except Unavailable:
            return

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _requested_stop(self) -> Stop | None:
        """Return how the worker is to stop, or None; while the database is unavailable, only `suspend` counts."""
        try:
            found = self._store.get(self.job_id).stop
        except Unavailable:
            found = None
        return found or (Stop.SAVE if self._suspended else None)

    def _is_stuck(self, attempt: int) -> bool:
        """Whether the worker has sent nothing for too long; one that has not begun may still wait for a free CPU."""
        if self._last_message is None or self._last_message[0] != attempt:
            return False
        return time.monotonic() - self._last_message[1] > self._settings.stall_timeout

    def _conclude(self, attempt: int, outcome: Outcome) -> bool:
        store, job = self._store, self._store.get(self.job_id)
        if isinstance(outcome, Finished):
            store.change(job.id, attempt, JobState.SUCCEEDED, model_path=outcome.model_path)
        elif isinstance(outcome, Failed):
            store.change(job.id, attempt, JobState.FAILED, error=outcome.error)
        elif job.state is JobState.CANCELLING:
            store.change(job.id, attempt, JobState.CANCELLED)
        elif isinstance(outcome, Stopped):
            store.append(job.id, attempt, [LogLine(text=self._why)])
            store.suspend(job.id, attempt)
        else:
            return self._recover(job, attempt, outcome)
        return False

    def _publish(self, job: JobRecord, path: str) -> bool:
        """Publish the model in the artefact store, waiting until the store is available; return whether it succeeded.

        On other errors, or if the job is to stop, the error is logged, and the model stays on this machine.
        """
        if self._settings.artifacts is None:
            return True

        def record_stall(error: AttnError) -> None:
            stalled = JobError.of(error)
            self._with_database(lambda: self._store.stall(job.id, job.attempt, stalled))

        try:
            with_retries(
                lambda: self._send(job, path),
                record_stall,
                retryable=is_store_error,
                pause=pausing(lambda: self._requested_stop() is None),
            )
        except Superseded:
            raise
        except AttnError as error:
            if self._suspended:
                return False
            text = f"the model could not be published and is only on this machine, in {path}: {error.message}"
            self._with_database(lambda: self._store.append(job.id, job.attempt, [LogLine(text=text)]))
            return False
        return True

    def _send(self, job: JobRecord, path: str) -> None:
        url = str(self._settings.artifacts)
        try:
            artifacts = ArtifactStore(url, self._settings.home / "artifacts")
        except OSError as error:
            raise Unavailable(f"the artefact store {url} cannot be used: {error}", store=url) from error
        if Path(path).is_dir():
            artifacts.publish(job.id, Path(path), job.owner)
        else:
            # The workers ran on other machines, and have published the model.
            artifacts.manifest(job.id)
        ModelRecords(self._store.database).record(ModelRecord(job.id, job.owner, artifact=job.id))

    def _recover(self, job: JobRecord, attempt: int, outcome: Lost) -> bool:
        if job.failures >= job.config.max_failures:
            self._store.change(job.id, attempt, JobState.FAILED, error=outcome.error)
            return False
        self._store.next_attempt(job.id, attempt, outcome.error, lost=True)
        return not self._suspended


def _retried(decide: Callable[[], Result]) -> Result:
    """Return the result of `decide`, which is run again if the job's state changed meanwhile."""
    try:
        return decide()
    except Superseded:
        raise
    except WrongState:
        return decide()
