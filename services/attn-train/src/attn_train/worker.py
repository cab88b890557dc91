"""The work of one attempt, in whatever process it runs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import torch
from attn_core.errors import AttnError, CheckpointWriteFailed, InternalError, OutOfCapacity, Unavailable
from attn_models.device import resolve_device
from attn_schema.locks import exclusive
from attn_schema.training import Checkpoint, JobError, LogLine, Metrics, TrainingConfig

from attn_train.attempt import (
    Assignment,
    Failed,
    Finished,
    GoesOn,
    Heartbeat,
    Lost,
    Outcome,
    SendMessage,
    Stalled,
    Stopped,
    TrainingStarted,
)
from attn_train.base_model import load_base
from attn_train.checkpoint import CheckpointFolder, Checkpoints
from attn_train.data.load import load_dataset
from attn_train.group import Group
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.settings import Layout
from attn_train.stalls import is_of_disk, persistently
from attn_train.tasks.base import Dataset, derived
from attn_train.tasks.distillation import distilled
from attn_train.trainer import Trainer

LOCK_SECONDS = 60.0
"""How long to wait until the worker of an earlier attempt has released its lock."""

HEARTBEAT_SECONDS = 5.0
"""Minimum time between two heartbeats."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def work(
    assignment: Assignment,
    send: SendMessage,
    stop: StopFlag,
    flush: Callable[[], None] = lambda: None,
    group: Group | None = None,
) -> Outcome:
    """Run an attempt to its end, or with a `group` this worker's part; errors become its outcome and are not raised.

    `flush` returns once all messages sent have been received.
    """
    layout, group = Layout(assignment.home), group or Group()
    try:
        with exclusive(layout.worker_lock(assignment.job_id), LOCK_SECONDS) if group.leads else nullcontext():
            return _train(assignment, MessageReporter(send, flush), stop, group)
    except Exception as error:  # whatever a mechanism raises is the job's error, not the worker's end
        log.exception("job %s failed in attempt %d", assignment.job_id, assignment.attempt)
        if group.lost_others(error):
            return Lost(error=JobError.of(Unavailable(f"another worker was lost: {error}")))
        return Failed(error=JobError.of(as_attn_error(error)))


def as_attn_error(error: Exception) -> AttnError:
    """The error as an `AttnError`, which can be recorded and sent."""
    if isinstance(error, AttnError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OutOfCapacity(f"not enough memory for this model and batch: {error}")
    return InternalError(f"{type(error).__name__}: {error}")


class MessageReporter:
    """A `Reporter` that sends messages to the supervisor."""

    def __init__(self, send: SendMessage, flush: Callable[[], None]) -> None:
        self.send = send
        self.flush = flush
        self._sent_at = -math.inf

    def heartbeat(self) -> None:
        """At most one message every `HEARTBEAT_SECONDS`."""
        if time.monotonic() - self._sent_at > HEARTBEAT_SECONDS:
            self._sent_at = time.monotonic()
            self.send(Heartbeat())

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """As a record."""
        self.send(Metrics(step=step, values=dict(values)))

    def checkpoint(self, step: int, where: str, size: int) -> None:
        """As a record."""
        self.send(Checkpoint(step=step, path=where, size_bytes=size, create_time=datetime.now(UTC)))

    def log(self, text: str) -> None:
        """As a line."""
        self.send(LogLine(text=text))


def _train(assignment: Assignment, reporter: MessageReporter, stop: StopFlag, group: Group) -> Outcome:
    layout = Layout(assignment.home)
    if assignment.threads is not None:
        torch.set_num_threads(assignment.threads)
    reporter.heartbeat()
    config = assignment.config
    dataset = distilled(load_dataset(config, assignment.home, reporter.log), config, assignment.home)
    base = None if config.model.base_model is None else load_base(config, assignment.home, reporter.log)
    model = build_model(config, dataset) if base is None else base.model
    checkpoints = CheckpointFolder(layout.checkpoints(assignment.job_id))
    if group.leads:
        checkpoints.sweep()
    described = _description(model, dataset, config.workers)
    rebuild = partial(build_model, config, dataset)
    trainer = Trainer(model, dataset, config, checkpoints=checkpoints, group=group, rebuild=rebuild)
    trainer.resume(reporter)
    reporter.log(described)
    reporter.send(TrainingStarted(step=trainer.step, checkpoint=_newest(checkpoints)))
    waiting = DiskWait(reporter, stop)
    try:
        # Workers of a group go on from their last checkpoint: all of them write one together.
        run = partial(trainer.run, reporter, stop)
        stopped = run() if config.workers > 1 else waiting.until_written(run)
        if stopped is not None:
            reporter.flush()
            return Stopped(stop=stopped)
        whole = trainer.whole_model()
        if whole is None:
            return Finished(model_path="")
        whole.cpu()
        target = layout.model(assignment.job_id)
        path = waiting.until_written(lambda: dataset.save(target, whole) if base is None else base.save(target))
    except CheckpointWriteFailed as error:
        asked = stop.get()
        if asked is None:
            raise
        reporter.log(f"{error.reason}: {error.message}; stopped as asked, at the checkpoint before it")
        return Stopped(stop=asked)
    reporter.flush()
    return Finished(model_path=str(path))


class DiskWait:
    """Has a worker wait where the disk is full or cannot be written: its job is stalled, and goes on by itself."""

    def __init__(self, reporter: MessageReporter, stop: StopFlag) -> None:
        self._reporter, self._stop = reporter, stop
        self._stalled = False

    def until_written(self, write: Callable[[], Result]) -> Result:
        """The result of `write` once the disk takes it; raises `CheckpointWriteFailed` when the job is to stop."""
        try:
            return persistently(write, self._tell, of=is_of_disk, wanted=self._wanted)
        finally:
            if self._stalled:
                self._stalled = False
                self._reporter.send(GoesOn())

    def _tell(self, error: AttnError) -> None:
        if not self._stalled:
            self._stalled = True
            self._reporter.send(Stalled(error=JobError.of(error)))

    def _wanted(self) -> bool:
        self._reporter.heartbeat()
        return self._stop.get() is None


def build_model(config: TrainingConfig, dataset: Dataset) -> Any:
    """The model of `config` with initial weights, on the device of the config; raises as `resolve_device`."""
    device = resolve_device(config.device)
    family, made = configured(config.model, dataset.model_fields)
    torch.manual_seed(derived(config.seed, "weights"))
    # Drawn on the CPU, so that a seed gives the same weights on every device.
    return family.build(made).to(device)


def _newest(checkpoints: Checkpoints) -> Checkpoint | None:
    newest = checkpoints.newest()
    if newest is None:
        return None
    return Checkpoint(step=newest.step, path=newest.where, size_bytes=newest.size, create_time=newest.written)


def _description(model: Any, dataset: Dataset, workers: int) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model_fields = ", ".join(f"{name} {value}" for name, value in dataset.model_fields.items())
    device = next(model.parameters()).device
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else f"on {device}"
    shared = f", {workers} workers" if workers > 1 else ""
    return f"{parameters} parameters, {model_fields}, {dataset.summary}, {where}{shared}"
