"""The work of one attempt, in whatever process it runs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attn_core import installed
from attn_core.errors import AttnError, InternalError, OutOfCapacity
from attn_schema.locks import exclusive

from attn_train.attempt import Assignment, Began, Failed, Finished, Outcome, Stopped, Tell, Working
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.load import load_material
from attn_train.records import CheckpointRecord, ErrorRecord, LogLine, MetricsRecord, StopFlag
from attn_train.settings import Layout
from attn_train.spec import TrainingSpec
from attn_train.tasks.base import Material, derived
from attn_train.trainer import Trainer

LOCK_SECONDS = 60.0
"""How long to wait for a predecessor to be gone."""

WORKING_SECONDS = 5.0
"""Between two messages that only say that the work goes on."""

log = logging.getLogger(__name__)


def work(assignment: Assignment, tell: Tell, stop: StopFlag, flush: Callable[[], None] = lambda: None) -> Outcome:
    """Do an attempt to its end; never raises for what goes wrong in it.

    `flush` returns when all that was told has arrived.
    """
    layout = Layout(assignment.home)
    try:
        with exclusive(layout.worker_lock(assignment.job_id), LOCK_SECONDS):
            return _train(assignment, layout, Teller(tell, flush), stop)
    except Exception as error:  # whatever a mechanism raises is the job's error, not the worker's end
        log.exception("job %s failed in attempt %d", assignment.job_id, assignment.attempt)
        return Failed(error=ErrorRecord.of(as_attn_error(error)))


def as_attn_error(error: Exception) -> AttnError:
    """The error as one that can be kept and sent."""
    if isinstance(error, AttnError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return OutOfCapacity(f"not enough memory for this model and batch: {error}")
    return InternalError(f"{type(error).__name__}: {error}")


class Teller:
    """The loop's report, as messages."""

    def __init__(self, tell: Tell, flush: Callable[[], None]) -> None:
        self.tell = tell
        self.flush = flush
        self._said_at = -math.inf

    def working(self) -> None:
        """As a message, every few seconds."""
        if time.monotonic() - self._said_at > WORKING_SECONDS:
            self._said_at = time.monotonic()
            self.tell(Working())

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """As a record."""
        self.tell(MetricsRecord(step=step, values=dict(values)))

    def checkpoint(self, step: int, path: Path, size: int) -> None:
        """As a record."""
        self.tell(CheckpointRecord(step=step, path=str(path), size=size, time=time.time()))

    def log(self, text: str) -> None:
        """As a line."""
        self.tell(LogLine(text=text))


def _train(assignment: Assignment, layout: Layout, teller: Teller, stop: StopFlag) -> Outcome:
    if assignment.threads is not None:
        torch.set_num_threads(assignment.threads)
    teller.working()
    spec = assignment.spec
    material = load_material(spec, assignment.home, teller.log)
    model = build_model(spec, material)
    checkpoints = CheckpointFolder(layout.checkpoints(assignment.job_id))
    checkpoints.sweep()
    trainer = Trainer(model, material, spec, checkpoints=checkpoints)
    trainer.resume()
    teller.log(_description(model, material))
    teller.tell(Began(step=trainer.step, checkpoint=_newest(checkpoints)))
    stopped = trainer.run(teller, stop)
    if stopped is not None:
        teller.flush()
        return Stopped(stop=stopped)
    path = material.save(layout.model(assignment.job_id), model.cpu())
    teller.flush()
    return Finished(model_path=str(path))


def build_model(spec: TrainingSpec, material: Material) -> Any:
    """The model of `spec` with its first weights, on the GPU if there is one."""
    family = installed().models.get(spec.model.family)
    config = family.configure(spec.model.values(material.decided))
    torch.manual_seed(derived(spec.seed, "weights"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return family.build(config).to(device)


def _newest(checkpoints: CheckpointFolder) -> CheckpointRecord | None:
    newest = checkpoints.newest()
    if newest is None:
        return None
    written = newest.path.stat().st_mtime
    return CheckpointRecord(step=newest.step, path=str(newest.path), size=newest.size, time=written)


def _description(model: Any, material: Material) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    decided = ", ".join(f"{name} {value}" for name, value in material.decided.items())
    return f"{parameters} parameters, {decided}, {material.sizes}, {torch.get_num_threads()} threads"
