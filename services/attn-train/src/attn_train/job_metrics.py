"""Exports the metrics of a job from its records: to files in its folder and, if configured, to a W&B run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from attn_schema.training import JobEvent

from attn_train.metrics_files import AT_ONCE, MetricsFiles, ReadEvents
from attn_train.records import JobRecord
from attn_train.settings import WANDB

PROJECT = "attn"
"""The W&B project of jobs, unless WANDB_PROJECT names another."""

log = logging.getLogger(__name__)


class MetricsWriter(Protocol):
    """Exports the metrics of one job in some format. Raises `OSError`, `ImportError` or `ValueError` if it cannot; a
    new object then continues."""

    def catch_up(self, read: ReadEvents) -> None:
        """Export the events that were recorded since the last call."""
        ...

    def close(self) -> None:
        """Write everything that is buffered, and release all resources."""
        ...


class JobMetrics:
    """The metrics writers of one job; each fails and is retried independently of the others."""

    def __init__(self, job: JobRecord, folder: Path, log_to: str | None = None) -> None:
        self._job_id = job.id
        self._makers: dict[str, Callable[[], MetricsWriter]] = {"metrics files": lambda: MetricsFiles(folder)}
        if log_to == WANDB:
            config = msgspec.to_builtins(job.config)
            self._makers["W&B run"] = lambda: WandbRun(folder, job.id, config)
        self._open: dict[str, MetricsWriter] = {}
        self._reported: dict[str, str] = {}

    def catch_up(self, read: ReadEvents) -> None:
        """Bring all writers up to date; each failure is logged once. Errors of the database in `read` are raised."""
        for name, make in self._makers.items():
            self._try(name, lambda name=name, make=make: self._opened(name, make).catch_up(read))  # type: ignore[misc]

    def close(self) -> None:
        """Close all writers; `catch_up` opens them again."""
        for name, writer in list(self._open.items()):
            self._try(name, writer.close)
        self._open.clear()

    def _opened(self, name: str, make: Callable[[], MetricsWriter]) -> MetricsWriter:
        if name not in self._open:
            self._open[name] = make()
        return self._open[name]

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ImportError, ValueError) as error:
            with contextlib.suppress(OSError, ImportError, ValueError):
                # Closed so that what it holds, such as the id of a run, is released and another can be opened.
                if (writer := self._open.pop(name, None)) is not None:
                    writer.close()
            if self._reported.get(name) != str(error):
                self._reported[name] = str(error)
                log.warning("job %s: the %s cannot be written: %s", self._job_id, name, error)


class WandbRun:
    """A W&B run with the job's id, written below `folder`; offline unless WANDB_MODE says otherwise.

    The library buffers data, which is lost if the process is killed. Therefore each object writes the whole history
    from the records into a new offline run and removes earlier ones: a job has one offline run, which contains each
    step once. An online run is resumed after the last step that W&B has.
    """

    def __init__(self, folder: Path, job_id: str, config: Mapping[str, Any]) -> None:
        self._folder, self._job_id, self._config = folder, job_id, config
        self._run: Any = None
        self._event = 0
        self._step = -1

    def catch_up(self, read: ReadEvents) -> None:
        """Log the events recorded since the last call; the run is started at the first event."""
        while found := read(self._event, AT_ONCE):
            if self._run is None:
                self._begin()
            for event in found:
                self._log(event)
                self._event = event.id

    def close(self) -> None:
        """Finish the run; the library's own process then completes the file, before this process ends at the latest."""
        run, self._run = self._run, None
        if run is not None:
            self._calling(run.finish)

    def _begin(self) -> None:
        wandb = importlib.import_module(WANDB)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._folder.mkdir(parents=True, exist_ok=True)
        for earlier in self._folder.glob(f"wandb/offline-run-*-{self._job_id}"):
            shutil.rmtree(earlier, ignore_errors=True)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
        )
        self._run = self._calling(
            lambda: wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=self._job_id,
                name=self._job_id,
                config=dict(self._config),
                dir=str(self._folder),
                mode=mode,
                resume="allow" if mode == "online" else None,
                reinit="create_new",
                settings=settings,
            )
        )
        self._step = self._run.step - 1

    def _log(self, event: JobEvent) -> None:
        if event.metrics is None or event.time is None or event.metrics.step <= self._step:
            return
        values = dict(event.metrics.values) | {"_timestamp": event.time.timestamp()}
        step = event.metrics.step
        self._calling(lambda: self._run.log(values, step=step))
        self._step = step

    def _calling(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call of the library; its exceptions, some without a public class, become `OSError`."""
        try:
            return call()
        except Exception as error:
            raise OSError(f"W&B: {error}") from error
