"""The work of a worker in one attempt, independent of the process that it runs in."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from attn_core.errors import AttnError, CheckpointWriteFailed, InternalError, OutOfCapacity, Unavailable, UserError
from attn_gateway.records import ArtifactStore
from attn_models.device import resolve_device
from attn_models.weights.manifest import TRAINING, record_source
from attn_schema.locks import exclusive
from attn_schema.output import significant
from attn_schema.training import Checkpoint, JobError, LogLine, Metrics, TrainingConfig

from attn_train.attempt import (
    Assignment,
    Failed,
    Finished,
    Heartbeat,
    Lost,
    Outcome,
    Resumed,
    SendMessage,
    Stalled,
    Stopped,
    TrainingStarted,
)
from attn_train.base_model import load_base
from attn_train.checkpoint import Saved
from attn_train.data.load import data_digest, load_dataset
from attn_train.doing import doing, now, telling
from attn_train.model import configured
from attn_train.object_checkpoints import checkpoints_of
from attn_train.process_group import Group
from attn_train.records import Stop, StopFlag
from attn_train.settings import Layout
from attn_train.stalls import is_disk_error, is_file_error, pausing, with_retries
from attn_train.tasks.base import Dataset, derived
from attn_train.tasks.distillation import distilled
from attn_train.tasks.grpo import PromptDataset
from attn_train.tasks.rollouts import RolloutsLost, sampler_of
from attn_train.trainer import Trainer

LOCK_SECONDS = 60.0
"""How long to wait for the worker of an earlier attempt to release its lock."""

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
    """Run an attempt to its end, or this worker's part of it with a `group`.

    `flush` returns once all messages sent have been recorded. Errors become the outcome and are not raised.
    """
    layout, group = Layout(assignment.home), group or Group()
    reporter = MessageReporter(send, flush)
    try:
        locked = exclusive(layout.worker_lock(assignment.job_id), LOCK_SECONDS) if group.leads else nullcontext()
        with locked, telling(reporter.tell):
            return _train(assignment, reporter, stop, group)
    except Exception as error:  # any error, such as a mechanism's, fails the job, not the worker process
        whose = None if isinstance(error, UserError) and error.__cause__ is None else error
        log.error("job %s failed in attempt %d: %s", assignment.job_id, assignment.attempt, error, exc_info=whose)
        if isinstance(error, RolloutsLost):
            return Lost(error=JobError.of(error))
        if group.lost_others(error):
            return Lost(error=JobError.of(Unavailable(f"another worker was lost: {error}")))
        return Failed(error=JobError.of(as_attn_error(error)))


def as_attn_error(error: Exception) -> AttnError:
    """Convert an error to an `AttnError`, which can be recorded and sent."""
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
        self.latest: dict[str, float] = {}
        """The newest value of each metric."""

    def heartbeat(self) -> None:
        """Send a heartbeat, at most once every `HEARTBEAT_SECONDS`."""
        if time.monotonic() - self._sent_at > HEARTBEAT_SECONDS:
            self.tell()

    def tell(self) -> None:
        """Send what this worker is doing."""
        self._sent_at = time.monotonic()
        self.send(Heartbeat(doing=now()))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics."""
        self.latest |= values
        self.send(Metrics(step=step, values=dict(values)))

    def checkpoint(self, step: int, where: str, size: int) -> None:
        """Send the checkpoint."""
        self.send(Checkpoint(step=step, path=where, size_bytes=size, create_time=datetime.now(UTC)))

    def log(self, text: str) -> None:
        """Send a log line."""
        self.send(LogLine(text=text))


def _train(assignment: Assignment, reporter: MessageReporter, stop: StopFlag, group: Group) -> Outcome:
    layout = Layout(assignment.home)
    if assignment.threads is not None:
        torch.set_num_threads(assignment.threads)
    config = assignment.config
    with doing("the reading of the data"):
        dataset = distilled(load_dataset(config, assignment.home, reporter.log), config, assignment.home)
    base = None if config.model.base_model is None else load_base(config, assignment.home, reporter.log)
    model = build_model(config, dataset) if base is None else base.model
    if isinstance(dataset, PromptDataset) and base is not None:
        dataset = replace(dataset, sampler=sampler_of(config, base.layout, group))
    described = _description(model, dataset, config.workers)
    trainer = _trainer(assignment, model, dataset, group)
    waiting = Waiting(reporter, stop, group)
    try:
        waiting.until_done(partial(trainer.resume, reporter), is_file_error)
        reporter.log(described)
        reporter.send(TrainingStarted(step=trainer.step, checkpoint=_message(trainer.resumed_from)))
        stopped = waiting.until_done(partial(trainer.run, reporter, stop))
        if stopped is not None:
            reporter.flush()
            return Stopped(stop=stopped)
        whole = trainer.whole_model()
        if whole is None:
            return Finished(model_path="")
        whole.cpu()
        target = layout.model(assignment.job_id)
        # Only the leading worker gets here, so it must not wait for the rest of the group.
        alone = Waiting(reporter, stop, Group())
        path = alone.until_done(lambda: dataset.save(target, whole) if base is None else base.save(target))
        trained = _facts(config, trainer.step, reporter.latest)
        alone.until_done(lambda: record_source(Path(path), {TRAINING: trained}))
        if config.workers > 1 and assignment.artifacts is not None:
            # The supervisor may be on another machine.
            alone.until_done(lambda: _publish(assignment, Path(path)), is_file_error)
    except (CheckpointWriteFailed, Unavailable) as error:
        asked = waiting.asked or stop.get()
        if asked is None:
            raise
        reporter.log(f"{error.reason}: {error.message}; stopped as requested, at the previous checkpoint")
        return Stopped(stop=asked)
    reporter.flush()
    return Finished(model_path=str(path))


def _trainer(assignment: Assignment, model: Any, dataset: Dataset, group: Group) -> Trainer:
    config = assignment.config
    checkpoints = checkpoints_of(assignment.job_id, assignment.home, assignment.artifacts)
    if group.leads:
        checkpoints.sweep()
    return Trainer(
        model,
        dataset,
        config,
        checkpoints=checkpoints,
        group=group,
        rebuild=partial(build_model, config, dataset),
        data_digest=data_digest(config, assignment.home, getattr(dataset, "files", ())),
    )


class Waiting:
    """Makes the workers of a group wait while a disk is full or the artefact store is unavailable: the job is STALLED,
    and continues by itself."""

    def __init__(self, reporter: MessageReporter, stop: StopFlag, group: Group) -> None:
        self._reporter, self._stop, self._group = reporter, stop, group
        self._stalled = False
        self.asked: Stop | None = None
        """How the job was asked to stop while it waited, if it was."""

    def until_done(self, work: Callable[[], Result], retryable: Callable[[AttnError], bool] = is_disk_error) -> Result:
        """Return the result of `work`, retrying it while it raises an error for which `retryable` is True; the error
        is raised when the job is to stop.

        If `work` is a collective, it fails in all workers, and all of them retry when the leading worker does.
        """
        try:
            return with_retries(work, self._report_stall, retryable=retryable, pause=self._pause)
        finally:
            if self._stalled:
                self._stalled = False
                self._reporter.send(Resumed())

    def _report_stall(self, error: AttnError) -> None:
        if not self._stalled:
            self._stalled = True
            self._reporter.send(Stalled(error=JobError.of(error)))

    def _pause(self, seconds: float) -> bool:
        """Wait until the leading worker continues or stops; return whether it continues."""
        if self._group.leads:
            pausing(self._wanted)(seconds)
        self.asked = self._group.agreed(self._stop.get())
        return self.asked is None

    def _wanted(self) -> bool:
        self._reporter.heartbeat()
        return self._stop.get() is None


def _publish(assignment: Assignment, model: Path) -> None:
    """Publish the finished model in the artefact store."""
    artifacts = ArtifactStore(str(assignment.artifacts), assignment.home / "artifacts")
    artifacts.publish(assignment.job_id, model, assignment.owner)


def build_model(config: TrainingConfig, dataset: Dataset) -> Any:
    """Build the model of `config` with initial weights on the device of the config; raises as `resolve_device` does."""
    device = resolve_device(config.device)
    family, made = configured(config.model, dataset.model_fields)
    torch.manual_seed(derived(config.seed, "weights"))
    # Initialised on the CPU, so that a seed gives the same weights on every device.
    return family.build(made).to(device)


def _message(saved: Saved | None) -> Checkpoint | None:
    if saved is None:
        return None
    return Checkpoint(step=saved.step, path=saved.where, size_bytes=saved.size, create_time=saved.written)


def _facts(config: TrainingConfig, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """What a model card says about a job: its data, steps, batches, learning rate and the newest losses."""
    optimizer, base = config.optimizer, config.model.base_model
    losses = {name: float(significant(value)) for name, value in metrics.items() if "loss" in name}
    return {
        "dataset": Path(config.data.dataset).name,
        **({} if base is None else {"base model": Path(base).name}),
        "steps": step,
        "batch size": optimizer.batch_size,
        "learning rate": optimizer.learning_rate,
        **losses,
    }


def _description(model: Any, dataset: Dataset, workers: int) -> str:
    every = list(model.parameters())
    count, trained = (sum(one.numel() for one in every if one.requires_grad or kept) for kept in (True, False))
    parameters = f"{count} parameters" if trained == count else f"{trained} of {count} parameters are trained"
    model_fields = ", ".join(f"{name} {value}" for name, value in dataset.model_fields.items())
    device = every[0].device
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else f"on {device}"
    shared = f", {workers} workers" if workers > 1 else ""
    return f"{parameters}, {model_fields}, {where}{shared}, {dataset.summary}"
