"""Records as rows of SQLite, and back."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

from attn_train.jobs.record import (
    CheckpointRecord,
    ErrorRecord,
    Event,
    Job,
    JobState,
    LogLine,
    MetricsRecord,
    Payload,
    StateChange,
)
from attn_train.loop.stop import Stop
from attn_train.spec import TrainingSpec

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
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
    "state": StateChange,
    "metrics": MetricsRecord,
    "checkpoint": CheckpointRecord,
    "log": LogLine,
}


def to_json(record: Any) -> str:
    """A record as JSON, keys sorted, so that equal records give equal text."""
    return json.dumps(dataclasses.asdict(record), sort_keys=True)


def kind_of(payload: Payload) -> str:
    """The word for the payload's class."""
    return next(word for word, kind in KINDS.items() if isinstance(payload, kind))


def payload_of(kind: str, text: str) -> Payload:
    """The payload that `kind_of` and `to_json` described."""
    values = json.loads(text)
    if kind == "state":
        error = values["error"]
        return StateChange(
            previous=JobState(values["previous"]),
            current=JobState(values["current"]),
            error=ErrorRecord(**error) if error else None,
        )
    return KINDS[kind](**values)


def event_of(row: sqlite3.Row) -> Event:
    """The event of a row of `events`."""
    payload = payload_of(row["kind"], row["payload"])
    return Event(id=row["event"], time=row["time"], attempt=row["attempt"], payload=payload)


def job_of(row: sqlite3.Row) -> Job:
    """The job of a row of `jobs`."""
    values = dict(row)
    values["spec"] = TrainingSpec.from_plain(json.loads(values["spec"]))
    values["state"] = JobState(values["state"])
    values["metrics"] = json.loads(values["metrics"])
    values["checkpoint"] = CheckpointRecord(**json.loads(values["checkpoint"])) if values["checkpoint"] else None
    values["error"] = ErrorRecord(**json.loads(values["error"])) if values["error"] else None
    values["stop"] = Stop(values["stop"]) if values["stop"] else None
    return Job(**values)
