"""The metrics of a job as files in its folder: JSON lines, and event files for TensorBoard.

Both are written from the records, which contain every event once. Each step is in the files once, as it was first
measured: a step that is repeated, because a worker was lost after its last checkpoint, gives the same values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn_schema.json_text import json_text
from attn_schema.training import JobEvent

LINES = "metrics.jsonl"
BOARD = "tensorboard"
"""The names of the JSON lines file and of the TensorBoard folder in a job's folder."""
AT_ONCE = 500
EVENT_FILES = "events.out.tfevents."
READ = "brain.Event:2"
"""The file version that TensorBoard expects at the beginning of event files."""

ReadEvents = Callable[[int, int], Sequence[JobEvent]]
"""Reads events of the job: (after, count) -> at most `count` events with ids above `after`, in order."""


class MetricsFiles:
    """Writes the metrics files of one job; only one process may do so at a time. Raises `OSError` if they cannot be
    written; a new object then continues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: Any = None
        self._board: Any = None
        self._event = 0
        self._step = -1

    def catch_up(self, read: ReadEvents) -> None:
        """Write the events that were recorded since the last line."""
        if self._lines is None and not read(0, 1):
            return
        if self._lines is None:
            self._open()
        while found := read(self._event, AT_ONCE):
            for event in found:
                if event.metrics is not None and event.metrics.step > self._step:
                    self._write(event)
                self._event = event.id

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, self._board):
            if file is not None:
                file.close()
        self._lines = self._board = None

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / LINES
        kept = path.read_bytes() if path.exists() else b""
        # An incomplete last line is removed and written again.
        kept = kept[: kept.rfind(b"\n") + 1]
        if kept:
            last = json.loads(kept[kept.rstrip(b"\n").rfind(b"\n") + 1 :])
            self._event, self._step = int(last["event"]), int(last["step"])
        lines = path.open("ab")
        lines.truncate(len(kept))
        self._lines = lines

    def _write(self, event: JobEvent) -> None:
        if event.metrics is None or event.time is None:
            return
        if self._board is None:
            self._board = _EventFile(self._folder / BOARD, first_step=self._step + 1)
        seconds, step, values = event.time.timestamp(), event.metrics.step, event.metrics.values
        # TensorBoard first: steps that it has and the lines lack are invalidated when a new object continues.
        self._board.add(seconds, step, values)
        head = {"event": event.id, "attempt": event.attempt, "time": event.time.isoformat(), "step": step}
        self._lines.write(json_text(head | dict(values)).encode() + b"\n")
        self._lines.flush()
        self._step = step


class _EventFile:
    """A new event file in a folder; it invalidates the steps from `first_step` on in earlier files."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads the files in the order of their names.
        newest = max((int(path.name.split(".")[3]) for path in folder.glob(EVENT_FILES + "*")), default=0)
        self._file = (folder / f"{EVENT_FILES}{max(int(time.time()), newest + 1):010d}.attn").open("xb")
        self._records = RecordWriter(self._file)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(event_pb2.Event(wall_time=time.time(), file_version=READ))
        self._append(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def add(self, seconds: float, step: int, values: Any) -> None:
        """Write the values of a step."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(self._event(wall_time=seconds, step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()
