"""The records of all jobs, shared by several processes: in SQLite on one machine, in PostgreSQL on several."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from attn_core.errors import AlreadyExists, UnknownName, WrongState
from attn_gateway.records import Database, Leases
from attn_gateway.records.tables import events, jobs
from attn_schema.json_text import json_text, number
from attn_schema.training import Checkpoint, JobError, JobEvent, JobState, LogLine, Metrics, StateChange, TrainingConfig
from sqlalchemy import Connection, RowMapping, Select, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from attn_train.records import JobRecord, Payload, Stop, require_transition
from attn_train.stalls import AT_WORK

KINDS: dict[str, type[Payload]] = {
    "state_change": StateChange,
    "metrics": Metrics,
    "checkpoint": Checkpoint,
    "log": LogLine,
}
"""Classes of event payloads, by their field in `JobEvent`."""


def kind_of(payload: Payload) -> str:
    """Return the field of `JobEvent` for a payload."""
    return next(name for name, kind in KINDS.items() if isinstance(payload, kind))


def event_of(row: RowMapping) -> JobEvent:
    """Convert a row of the table `events` to an event."""
    kind = KINDS[row["kind"]]
    read: Any = _metrics(row["payload"]) if kind is Metrics else _from_json(row["payload"], kind)
    payload = {row["kind"]: read}
    return JobEvent(id=row["event"], time=_datetime(row["time"]), attempt=row["attempt"], **payload)


def job_of(row: RowMapping) -> JobRecord:
    """Convert a row of the table `jobs` to a job."""
    return JobRecord(
        number=row["number"],
        id=row["id"],
        owner=row["owner"],
        config=TrainingConfig.from_mapping(json.loads(row["config"])),
        state=JobState(row["state"]),
        attempt=row["attempt"],
        failures=row["failures"],
        step=row["step"],
        last_metrics=_numbers(json.loads(row["metrics"])),
        latest_checkpoint=_from_json(row["checkpoint"], Checkpoint),
        error=_from_json(row["error"], JobError),
        stop=Stop(row["stop"]) if row["stop"] else None,
        model_path=row["model_path"],
        create_time=_datetime(row["created"]),
        start_time=_datetime(row["started"]),
        end_time=_datetime(row["ended"]),
        last_event_id=row["last_event"],
        priority=row["priority"],
    )


def _metrics(text: str) -> Metrics:
    fields = json.loads(text)
    return Metrics(step=fields["step"], values=_numbers(fields["values"]))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in values.items()}


def _from_json(text: str | None, kind: type[Any]) -> Any:
    return msgspec.json.decode(text, type=kind) if text else None


def _datetime(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


NAMED_IN_ERRORS = 50
"""The number of newest job ids that are searched for similar names in errors."""


def supervisor_lease(job_id: str) -> str:
    """Return the name of the lease of a job's supervisor."""
    return f"supervisor/{job_id}"


class Superseded(WrongState):
    """The attempt that writes is not the job's newest: another one has replaced it, and nothing was written."""

    reason = "SUPERSEDED"


class JobStore:
    """Stores jobs and their events; every method is one transaction, and may be called from any thread.

    Writes of an attempt carry its number and are rejected once a newer attempt has begun (fencing). With a `tenant`,
    only its own jobs and those without an owner are visible; None means all jobs.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def submit(self, job_id: str, config: TrainingConfig, owner: str = "", priority: int = 0) -> JobRecord:
        """Record a job, or return the existing one with this id, the same owner and an equal configuration.

        Raises `AlreadyExists` if the id belongs to a different job.
        """
        values = {"id": job_id, "owner": owner, "config": json_text(config), "state": S.QUEUED, "created": time.time()}
        values |= {"priority": priority}
        try:
            return self._submit(job_id, values)
        except IntegrityError:
            # Another process recorded this id after the lookup.
            return self._submit(job_id, values)

    def _submit(self, job_id: str, values: dict[str, Any]) -> JobRecord:
        with self.database.writing() as connection:
            found = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().first()
            if found is None:
                connection.execute(insert(jobs).values(values))
            elif found["owner"] != values["owner"]:
                raise AlreadyExists(f"the id {job_id!r} cannot be used; choose another job id", job=job_id)
            elif found["config"] != values["config"]:
                raise AlreadyExists(f"job {job_id!r} exists with another configuration", job=job_id)
            return _job(connection, job_id)

    def get(self, job_id: str, tenant: str | None = None) -> JobRecord:
        """Return a job; raises `UnknownName`, with similar ids."""
        with self.database.reading() as connection:
            return _job(connection, job_id, tenant)

    def page(self, before: int | None, count: int, tenant: str | None = None) -> list[JobRecord]:
        """Return at most `count` jobs with numbers below `before`, newest first."""
        query = _visible(select(jobs), tenant).order_by(jobs.c.number.desc()).limit(count)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return list(map(job_of, rows))

    def unfinished(self) -> list[JobRecord]:
        """Return all jobs that are not in a final state, oldest first."""
        query = select(jobs).where(jobs.c.ended.is_(None)).order_by(jobs.c.number)
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return [job for job in map(job_of, rows) if not job.state.final]

    def used_seconds(self, within: float) -> dict[str, float]:
        """Return the worker-seconds of each owner's jobs in the last `within` seconds; of a job that was started more
        than once, only the time since its last start is known."""
        now, used = time.time(), dict[str, float]()
        columns = (jobs.c.owner, jobs.c.config, jobs.c.started, jobs.c.ended)
        recent = jobs.c.started.is_not(None) & (jobs.c.state != S.QUEUED)
        recent &= jobs.c.ended.is_(None) | (jobs.c.ended > now - within)
        with self.database.reading() as connection:
            for owner, config, started, ended in connection.execute(select(*columns).where(recent)):
                seconds = max(0.0, (ended or now) - max(started, now - within))
                used[owner] = used.get(owner, 0.0) + seconds * json.loads(config).get("workers", 1)
        return used

    def events(self, job_id: str, after: int, count: int) -> list[JobEvent]:
        """Return at most `count` events with ids above `after`, in order."""
        wanted = (events.c.job == job_id) & (events.c.event > after)
        query = select(events).where(wanted).order_by(events.c.event).limit(count)
        with self.database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return list(map(event_of, rows))

    def change(
        self, job_id: str, attempt: int, state: JobState, *, error: JobError | None = None, model_path: str = ""
    ) -> JobRecord:
        """Move the job to `state` on behalf of `attempt`; `error` is the reason, if any.

        Raises `Superseded` for an old attempt, `WrongState` if the transition is not allowed.
        """
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            _move(connection, job, state, error)
            if model_path:
                _set(connection, job_id, model_path=model_path)
            return _job(connection, job_id)

    def next_attempt(
        self, job_id: str, attempt: int, error: JobError | None = None, *, lost: bool = False
    ) -> JobRecord:
        """Begin the next attempt of a running job: its state becomes RECOVERING, and `attempt` can no longer write.

        With `lost`, a lost worker is counted.
        """
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            _set(connection, job_id, attempt=attempt + 1, failures=job.failures + int(lost))
            _move(connection, job, S.RECOVERING, error, attempt=attempt + 1)
            return _job(connection, job_id)

    def suspend(self, job_id: str, attempt: int) -> JobRecord:
        """Put a running job back into the queue; `attempt` can no longer write."""
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            _set(connection, job_id, attempt=attempt + 1)
            _move(connection, job, S.QUEUED, None, attempt=attempt + 1)
            return _job(connection, job_id)

    def append(self, job_id: str, attempt: int, payloads: Sequence[Payload]) -> None:
        """Record events of `attempt`, and update the job's step, metrics and checkpoint from them.

        Raises `Superseded` for an old attempt, and once the job is in a final state.
        """
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            if job.state.final:
                raise Superseded(f"job {job_id!r} is {job.state}", job=job_id)
            metrics = dict(job.last_metrics)
            for payload in payloads:
                _append(connection, job_id, attempt, payload)
                if isinstance(payload, Metrics):
                    metrics |= payload.values
                    _set(connection, job_id, step=payload.step, metrics=json_text(metrics))
                elif isinstance(payload, Checkpoint):
                    _set(connection, job_id, checkpoint=json_text(payload))

    def begin(self, job_id: str, attempt: int, step: int, checkpoint: Checkpoint | None) -> None:
        """Record that `attempt` trains from `step`: the job is RUNNING unless it was asked to stop.

        Raises `Superseded` for an old attempt.
        """
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            text = json_text(checkpoint) if checkpoint else None
            _set(connection, job_id, step=step, checkpoint=text, started=time.time())
            # A job that was STALLED before it began no longer waits.
            if job.state not in (S.CANCELLING, S.RUNNING):
                _move(connection, job, S.RUNNING, None)

    def stall(self, job_id: str, attempt: int, error: JobError) -> None:
        """Record that `attempt` waits because of `error`: the job is STALLED unless it was asked to stop.

        Raises `Superseded` for an old attempt.
        """
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            if job.state in AT_WORK and job.state is not S.STALLED:
                _move(connection, job, S.STALLED, error)

    def go_on(self, job_id: str, attempt: int) -> None:
        """Record that `attempt` no longer waits: a STALLED job is RUNNING again. Raises `Superseded`."""
        with self.database.writing() as connection:
            job = _fenced(connection, job_id, attempt)
            if job.state is S.STALLED:
                _move(connection, job, S.RUNNING, None)

    def unattended_seconds(self, job_ids: Sequence[str]) -> dict[str, float]:
        """Return, for each job whose supervisor's lease has expired without being released, the seconds since then."""
        names = {supervisor_lease(job_id): job_id for job_id in job_ids}
        return {names[name]: seconds for name, seconds in Leases(self.database).overdue(list(names)).items()}

    def request_stop(self, job_id: str, stop: Stop, tenant: str | None = None) -> JobRecord:
        """Ask a job to stop; a job in a final state is not changed."""
        with self.database.writing() as connection:
            job = _locked(connection, job_id, tenant)
            if not job.state.final:
                if job.stop is not Stop.DISCARD:
                    _set(connection, job_id, stop=stop)
                if job.state is not S.CANCELLING:
                    _move(connection, job, S.CANCELLING, None)
            return _job(connection, job_id)

    def delete(self, job_id: str, tenant: str | None = None, files: Callable[[], None] = lambda: None) -> JobRecord:
        """Delete a job and its events; `files` removes its files while no other process can restart it.

        Raises `WrongState` unless it is in a final state. The lease is kept: a new job with this id needs its fence.
        """
        with self.database.writing() as connection:
            job = _locked(connection, job_id, tenant)
            if not job.state.final:
                message = f"job {job_id!r} is {job.state}; only jobs that have ended can be deleted: cancel it first"
                raise WrongState(message, job=job_id, state=job.state)
            files()
            connection.execute(delete(events).where(events.c.job == job_id))
            connection.execute(delete(jobs).where(jobs.c.id == job_id))
            return job

    def requeue(self, job_id: str, tenant: str | None = None) -> JobRecord:
        """Put a failed or cancelled job back into the queue for a new attempt; raises `WrongState` in other states."""
        with self.database.writing() as connection:
            job = _locked(connection, job_id, tenant)
            if job.state not in (S.FAILED, S.CANCELLED):
                message = f"job {job_id!r} is {job.state}; only failed or cancelled jobs can be resumed"
                raise WrongState(message, job=job_id, state=job.state)
            again = {"failures": 0, "stop": None, "error": None, "ended": None, "started": None}
            _set(connection, job_id, attempt=job.attempt + 1, **again)
            _move(connection, job, S.QUEUED, None, attempt=job.attempt + 1)
            return _job(connection, job_id)


S = JobState


def _visible(query: Select[Any], tenant: str | None) -> Select[Any]:
    return query if tenant is None else query.where(jobs.c.owner.in_(("", tenant)))


def _locked(connection: Connection, job_id: str, tenant: str | None = None) -> JobRecord:
    """Return a job and lock its row until the transaction ends."""
    return _found(connection, select(jobs).with_for_update(), job_id, tenant)


def _job(connection: Connection, job_id: str, tenant: str | None = None) -> JobRecord:
    return _found(connection, select(jobs), job_id, tenant)


def _found(connection: Connection, query: Select[Any], job_id: str, tenant: str | None) -> JobRecord:
    row = connection.execute(_visible(query.where(jobs.c.id == job_id), tenant)).mappings().first()
    if row is None:
        recent = _visible(select(jobs.c.id), tenant).order_by(jobs.c.number.desc()).limit(NAMED_IN_ERRORS)
        raise UnknownName.of("training job", job_id, list(connection.execute(recent).scalars()))
    return job_of(row)


def _fenced(connection: Connection, job_id: str, attempt: int) -> JobRecord:
    job = _locked(connection, job_id)
    if job.attempt != attempt:
        raise Superseded(f"attempt {attempt} of job {job_id!r} has been replaced by attempt {job.attempt}", job=job_id)
    return job


def _set(connection: Connection, job_id: str, **values: Any) -> None:
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))


def _append(connection: Connection, job_id: str, attempt: int, payload: Payload) -> None:
    counted = update(jobs).where(jobs.c.id == job_id).values(last_event=jobs.c.last_event + 1)
    event = connection.execute(counted.returning(jobs.c.last_event)).scalar_one()
    values = {"job": job_id, "event": event, "time": time.time(), "attempt": attempt}
    connection.execute(insert(events).values(values | {"kind": kind_of(payload), "payload": json_text(payload)}))


def _move(
    connection: Connection, job: JobRecord, state: JobState, error: JobError | None, *, attempt: int | None = None
) -> None:
    require_transition(job.id, job.state, state)
    recorded = json_text(error) if state in (S.FAILED, S.STALLED) and error is not None else None
    values: dict[str, Any] = {"state": state, "error": recorded}
    if state.final:
        values["ended"] = time.time()
    _set(connection, job.id, **values)
    _append(connection, job.id, attempt or job.attempt, StateChange(previous=job.state, current=state, error=error))
