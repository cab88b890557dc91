"""The training loop: one run of a model over its data, from its newest checkpoint to its last step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from attn_core.errors import CheckpointWriteFailed, UserError
from attn_models.decoder.mixture_of_experts import update_router_biases
from torch import Tensor, nn

from attn_train.checkpoint import CheckpointFolder, Progress, random_states, read_checkpoint, restore_random_states
from attn_train.optimizer import PRECISIONS, adamw, learning_rate, moments, restore_moments
from attn_train.records import Stop, StopFlag
from attn_train.spec import TrainingSpec
from attn_train.tasks.base import Material, derived


class Report(Protocol):
    """Receives what happens in a run, in order, on the loop's thread; must return quickly."""

    def working(self) -> None:
        """An update or a batch of an evaluation was done."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values measured when `step` updates were done, by name."""
        ...

    def checkpoint(self, step: int, path: Path, size: int) -> None:
        """The folder `path` of `size` bytes holds a complete checkpoint."""
        ...

    def log(self, text: str) -> None:
        """A line for people."""
        ...

    def flush(self) -> None:
        """Return when all of the above has arrived: called before a checkpoint makes it history."""
        ...


class Silence:
    """A report that nobody reads."""

    def working(self) -> None:
        """Nothing."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def checkpoint(self, step: int, path: Path, size: int) -> None:
        """Nothing."""

    def log(self, text: str) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class TrainingDiverged(UserError):  # noqa: N818 - named, as all errors here, for what happened
    """The loss is no longer a number; the specification asks for too much."""

    reason = "TRAINING_DIVERGED"


@dataclass
class Stretch:
    """Training since the last metrics, without evaluation and checkpoints: seconds, after how many tokens it began."""

    seconds: float = 0.0
    tokens: int = 0


class Trainer:
    """Trains `model`, a `LanguageModel`, on a text or pairs as `spec` says, on the device the model is on.

    `checkpoints` None keeps nothing. The run goes on from its newest checkpoint, bit for bit.
    """

    def __init__(
        self, model: nn.Module, text: Material, spec: TrainingSpec, *, checkpoints: CheckpointFolder | None = None
    ) -> None:
        self.model = model
        self.spec = spec
        self.step = 0
        self.elapsed = 0.0
        self._checkpoints = checkpoints
        self._optimizer = adamw(model, spec.optimizer)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._trained[0].device
        self._lessons = text.lessons(spec)
        self._stretch = Stretch()
        self._saved_step: int | None = None

    def resume(self) -> bool:
        """Go to where the newest checkpoint is; False if there is none.

        Raises CheckpointInvalid if it is damaged or does not fit the model.
        """
        newest = self._checkpoints.newest() if self._checkpoints else None
        if newest is None:
            return False
        progress, parts = read_checkpoint(newest.path)
        with torch.no_grad():
            for name, tensor in _kept(self.model).items():
                tensor.copy_(parts["weights"][name])
        restore_moments(self.model, self._optimizer, parts["optimizer"])
        restore_random_states(self._lessons.generator, parts["random"])
        self.step, self.elapsed, self._saved_step = progress.step, progress.elapsed_seconds, progress.step
        return True

    def run(self, report: Report, stop: StopFlag) -> Stop | None:
        """Train to the last step and return None, or stop when asked to and return how.

        Raises TrainingDiverged when the loss is not finite, CheckpointWriteFailed if the last checkpoint cannot
        be written; a failure of an earlier one is reported and the run goes on.
        """
        self.model.train()
        if self.step == 0:
            torch.manual_seed(derived(self.spec.seed, "dropout"))
        while self.step < self.spec.optimizer.steps:
            asked = stop.get()
            if asked is not None:
                if asked is Stop.SAVE:
                    self.save(report)
                return asked
            self._one_step(report)
        self.save(report)
        return None

    def save(self, report: Report) -> None:
        """Write a checkpoint unless the newest is of this step. Raises CheckpointWriteFailed."""
        if self._checkpoints is None or self._saved_step == self.step:
            return
        report.flush()
        parts = {
            "weights": _kept(self.model),
            "optimizer": moments(self.model, self._optimizer),
            "random": random_states(self._lessons.generator),
        }
        written = self._checkpoints.write(Progress(step=self.step, elapsed_seconds=self.elapsed), parts)
        self._saved_step = self.step
        report.checkpoint(written.step, written.path, written.size)
        self._checkpoints.prune(self.spec.checkpoint.keep)

    def validation_loss(self, batches: int, done: Callable[[], None] = lambda: None) -> float | None:
        """Mean loss, in nats a token, over `batches` batches kept for validation; None if there are too few.

        `done` is called after each batch.
        """
        return self._lessons.validation_loss(self.model, batches, done)

    def _one_step(self, report: Report) -> None:
        began = time.perf_counter()
        rate = learning_rate(self.step, self.spec.optimizer)
        loss, norm = self._update(rate)
        self.step += 1
        report.working()
        last = self.step == self.spec.optimizer.steps
        measured = last or self.step % self.spec.checkpoint.metrics_interval == 0
        values = {"loss": loss.item(), "learning_rate": rate, "gradient_norm": norm.item()} if measured else {}
        seconds = time.perf_counter() - began
        self.elapsed += seconds
        self._stretch.seconds += seconds
        if measured:
            values |= self._speed()
            self._require_finite(values["loss"])
        if last or self.step % self.spec.checkpoint.evaluation_interval == 0:
            validation = self.validation_loss(self.spec.checkpoint.evaluation_batches, report.working)
            values |= {} if validation is None else {"validation_loss": validation}
        if last:
            values |= self._lessons.final_values(self.model, report.working)
        if values:
            report.metrics(self.step, values)
        if self.step % self.spec.checkpoint.interval == 0 and not last:
            self._save_or_say(report)

    def _update(self, rate: float) -> tuple[Tensor, Tensor]:
        batch = tuple(part.to(self._device, non_blocking=True) for part in self._lessons.draw())
        with PRECISIONS[self.spec.precision]():
            loss = self._lessons.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self.spec.optimizer.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self._trained, limit)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        update_router_biases(self.model)
        return loss.detach(), norm

    def _speed(self) -> dict[str, float]:
        speed = (self._lessons.tokens - self._stretch.tokens) / self._stretch.seconds
        self._stretch = Stretch(tokens=self._lessons.tokens)
        return {"tokens_per_second": speed, "elapsed_seconds": self.elapsed}

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss is {loss} at step {self.step}; a lower learning rate or a longer warm-up may help",
                step=self.step,
                loss=loss,
            )

    def _save_or_say(self, report: Report) -> None:
        try:
            self.save(report)
        except CheckpointWriteFailed as error:
            report.log(f"{error.reason}: {error.message}; training goes on")


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; what two names share appears once."""
    parameters = dict(model.named_parameters())
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    return {**parameters, **buffers}
