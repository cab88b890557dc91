"""The records of all jobs, in one SQLite file that several processes of one machine share."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from attn_core.errors import AlreadyExists, UnknownName, WrongState
from attn_schema.training import Checkpoint, JobError, JobEvent, JobState, LogLine, Metrics, StateChange, TrainingConfig

from attn_train.records import JobRecord, Payload, Stop, require_transition

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    config TEXT NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 1,
    failures INTEGER NOT NULL DEFAULT 0,
    step INTEGER NOT NULL DEFAULT 0,
    metrics TEXT NOT NULL DEFAULT '{}',
    checkpoint TEXT,
    error TEXT,
    stop TEXT,
    model_path TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    last_event INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL REFERENCES jobs (id),
    event INTEGER NOT NULL,
    time REAL NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    PRIMARY KEY (job, event)
) STRICT, WITHOUT ROWID;
"""

KINDS: dict[str, type[Payload]] = {
    "state_change": StateChange,
    "metrics": Metrics,
    "checkpoint": Checkpoint,
    "log": LogLine,
}
"""Classes of payloads by their field in `JobEvent`."""


def to_json(noun: Any) -> str:
    """A noun as JSON, keys sorted, so that equal nouns give equal text."""
    return msgspec.json.encode(noun, order="deterministic").decode()


def kind_of(payload: Payload) -> str:
    """The field of `JobEvent` for a payload."""
    return next(name for name, kind in KINDS.items() if isinstance(payload, kind))


def event_of(row: sqlite3.Row) -> JobEvent:
    """The event of a row of `events`."""
    payload = {row["kind"]: _from_json(row["payload"], KINDS[row["kind"]])}
    return JobEvent(id=row["event"], time=_datetime(row["time"]), attempt=row["attempt"], **payload)


def job_of(row: sqlite3.Row) -> JobRecord:
    """The job of a row of `jobs`."""
    return JobRecord(
        number=row["number"],
        id=row["id"],
        config=TrainingConfig.from_mapping(json.loads(row["config"])),
        state=JobState(row["state"]),
        attempt=row["attempt"],
        failures=row["failures"],
        step=row["step"],
        last_metrics=json.loads(row["metrics"]),
        latest_checkpoint=_from_json(row["checkpoint"], Checkpoint),
        error=_from_json(row["error"], JobError),
        stop=Stop(row["stop"]) if row["stop"] else None,
        model_path=row["model_path"],
        create_time=_datetime(row["created"]),
        start_time=_datetime(row["started"]),
        end_time=_datetime(row["ended"]),
        last_event_id=row["last_event"],
    )


def _from_json(text: str | None, kind: type[Any]) -> Any:
    return msgspec.json.decode(text, type=kind) if text else None


def _datetime(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


BUSY_SECONDS = 30.0
NAMED_IN_ERRORS = 50
"""Newest job ids among which near names are searched."""


class Superseded(WrongState):
    """The writer's attempt is not the job's newest: another has taken over, and nothing was written."""

    reason = "SUPERSEDED"


class JobStore:
    """Jobs and their events; every method is one transaction, and may be called from any thread.

    What an attempt writes names the attempt and is refused once a newer one has begun (fencing).
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        # With WAL readers never wait; NORMAL loses nothing when a process dies, only when the machine does.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.executescript(SCHEMA)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def submit(self, job_id: str, config: TrainingConfig) -> JobRecord:
        """Record a job, or return the one of this id and an equal configuration; else raises AlreadyExists."""
        text = to_json(config)
        with self._transaction() as run:
            found = run("SELECT * FROM jobs WHERE id = ?", job_id).fetchone()
            if found is None:
                now = time.time()
                run("INSERT INTO jobs (id, config, state, created) VALUES (?, ?, ?, ?)", job_id, text, S.QUEUED, now)
            elif found["config"] != text:
                raise AlreadyExists(f"job {job_id!r} exists with another configuration", job=job_id)
            return _job(run, job_id)

    def get(self, job_id: str) -> JobRecord:
        """The job; raises UnknownName with near ids."""
        with self._reading() as run:
            return _job(run, job_id)

    def page(self, before: int | None, count: int) -> list[JobRecord]:
        """At most `count` jobs, newest first, of those with numbers below `before`."""
        query = "SELECT * FROM jobs WHERE number < ? ORDER BY number DESC LIMIT ?"
        with self._reading() as run:
            return [job_of(row) for row in run(query, 2**62 if before is None else before, count)]

    def unfinished(self) -> list[JobRecord]:
        """All jobs not in a final state, oldest first."""
        with self._reading() as run:
            jobs = map(job_of, run("SELECT * FROM jobs WHERE ended IS NULL ORDER BY number"))
            return [job for job in jobs if not job.state.final]

    def events(self, job_id: str, after: int, count: int) -> list[JobEvent]:
        """At most `count` events with ids above `after`, in order."""
        query = "SELECT * FROM events WHERE job = ? AND event > ? ORDER BY event LIMIT ?"
        with self._reading() as run:
            return [event_of(row) for row in run(query, job_id, after, count)]

    def change(
        self, job_id: str, attempt: int, state: JobState, *, error: JobError | None = None, model_path: str = ""
    ) -> JobRecord:
        """Move the job to `state` on behalf of `attempt`; `error` says why.

        Raises Superseded for an old attempt, WrongState for a state that may not follow.
        """
        with self._transaction() as run:
            job = _fenced(run, job_id, attempt)
            _move(run, job, state, error)
            if model_path:
                run("UPDATE jobs SET model_path = ? WHERE id = ?", model_path, job_id)
            return _job(run, job_id)

    def next_attempt(
        self, job_id: str, attempt: int, error: JobError | None = None, *, lost: bool = False
    ) -> JobRecord:
        """Begin the next attempt of a job that runs: its state is RECOVERING, and `attempt` can write no more.

        `lost` counts a lost worker.
        """
        with self._transaction() as run:
            job = _fenced(run, job_id, attempt)
            update = "UPDATE jobs SET attempt = attempt + 1, failures = failures + ? WHERE id = ?"
            run(update, int(lost), job_id)
            _move(run, job, S.RECOVERING, error, attempt=attempt + 1)
            return _job(run, job_id)

    def suspend(self, job_id: str, attempt: int) -> JobRecord:
        """Put a job that runs back into the queue; `attempt` can write no more."""
        with self._transaction() as run:
            job = _fenced(run, job_id, attempt)
            run("UPDATE jobs SET attempt = attempt + 1 WHERE id = ?", job_id)
            _move(run, job, S.QUEUED, None, attempt=attempt + 1)
            return _job(run, job_id)

    def append(self, job_id: str, attempt: int, payloads: Sequence[Payload]) -> None:
        """Record events of `attempt`, and what they say of the job. Raises Superseded, too, once the job is final."""
        with self._transaction() as run:
            job = _fenced(run, job_id, attempt)
            if job.state.final:
                raise Superseded(f"job {job_id!r} is {job.state}", job=job_id)
            for payload in payloads:
                _append(run, job_id, attempt, payload)
                if isinstance(payload, Metrics):
                    metrics = {**_metrics(run, job_id), **payload.values}
                    run("UPDATE jobs SET step = ?, metrics = ? WHERE id = ?", payload.step, json.dumps(metrics), job.id)
                elif isinstance(payload, Checkpoint):
                    run("UPDATE jobs SET checkpoint = ? WHERE id = ?", to_json(payload), job_id)

    def begin(self, job_id: str, attempt: int, step: int, checkpoint: Checkpoint | None) -> None:
        """`attempt` trains, from `step`: the job is RUNNING unless it was asked to stop. Raises Superseded."""
        with self._transaction() as run:
            job = _fenced(run, job_id, attempt)
            text = to_json(checkpoint) if checkpoint else None
            run("UPDATE jobs SET step = ?, checkpoint = ?, started = ? WHERE id = ?", step, text, time.time(), job_id)
            if job.state is not S.CANCELLING:
                _move(run, job, S.RUNNING, None)

    def request_stop(self, job_id: str, stop: Stop) -> JobRecord:
        """Ask a job to stop; one in a final state stays as it is."""
        with self._transaction() as run:
            job = _job(run, job_id)
            if not job.state.final:
                if job.stop is not Stop.DISCARD:
                    run("UPDATE jobs SET stop = ? WHERE id = ?", stop, job_id)
                if job.state is not S.CANCELLING:
                    _move(run, job, S.CANCELLING, None)
            return _job(run, job_id)

    def requeue(self, job_id: str) -> JobRecord:
        """Make a failed or cancelled job wait for another attempt; raises WrongState in any other state."""
        with self._transaction() as run:
            job = _job(run, job_id)
            if job.state not in (S.FAILED, S.CANCELLED):
                message = f"job {job_id!r} is {job.state}; only failed or cancelled jobs can be resumed"
                raise WrongState(message, job=job_id, state=job.state)
            update = (
                "UPDATE jobs SET attempt = attempt + 1, failures = 0, stop = NULL, error = NULL, ended = NULL,"
                " started = NULL WHERE id = ?"
            )
            run(update, job_id)
            _move(run, job, S.QUEUED, None, attempt=job.attempt + 1)
            return _job(run, job_id)

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[Any]:
        with self._lock:
            execute = self._connection.execute
            execute(begin)
            try:
                yield lambda query, *values: execute(query, values)
            except BaseException:
                execute("ROLLBACK")
                raise
            execute("COMMIT")

    def _reading(self) -> AbstractContextManager[Any]:
        return self._transaction("BEGIN")


S = JobState


def _job(run: Any, job_id: str) -> JobRecord:
    row = run("SELECT * FROM jobs WHERE id = ?", job_id).fetchone()
    if row is None:
        recent = run("SELECT id FROM jobs ORDER BY number DESC LIMIT ?", NAMED_IN_ERRORS)
        raise UnknownName.of("training job", job_id, [row["id"] for row in recent])
    return job_of(row)


def _fenced(run: Any, job_id: str, attempt: int) -> JobRecord:
    job = _job(run, job_id)
    if job.attempt != attempt:
        raise Superseded(f"attempt {attempt} of job {job_id!r} has been replaced by attempt {job.attempt}", job=job_id)
    return job


def _metrics(run: Any, job_id: str) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(run("SELECT metrics FROM jobs WHERE id = ?", job_id).fetchone()["metrics"])
    return metrics


def _append(run: Any, job_id: str, attempt: int, payload: Payload) -> None:
    run("UPDATE jobs SET last_event = last_event + 1 WHERE id = ?", job_id)
    event = run("SELECT last_event FROM jobs WHERE id = ?", job_id).fetchone()["last_event"]
    values = (job_id, event, time.time(), attempt, kind_of(payload), to_json(payload))
    run("INSERT INTO events (job, event, time, attempt, kind, payload) VALUES (?, ?, ?, ?, ?, ?)", *values)


def _move(run: Any, job: JobRecord, state: JobState, error: JobError | None, *, attempt: int | None = None) -> None:
    require_transition(job.id, job.state, state)
    run("UPDATE jobs SET state = ? WHERE id = ?", state, job.id)
    if state.final:
        run("UPDATE jobs SET ended = ? WHERE id = ?", time.time(), job.id)
    if state is S.FAILED and error is not None:
        run("UPDATE jobs SET error = ? WHERE id = ?", to_json(error), job.id)
    _append(run, job.id, attempt or job.attempt, StateChange(previous=job.state, current=state, error=error))
