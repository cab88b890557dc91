"""The training loop: trains a model from its newest checkpoint to its last step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from attn_core.errors import AttnError, CheckpointInvalid, Incompatible, Unavailable
from attn_models.decoder.mixture_of_experts import update_router_biases
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.async_checkpoint import AsyncCheckpoints, Stops, Written
from attn_train.base_model import adapter_of
from attn_train.checkpoint import (
    Checkpoints,
    Progress,
    Saved,
    random_states,
    read_progress,
    restore_random_states,
)
from attn_train.collectives import require_no_failure
from attn_train.divergence import Divergence, EqualRewards, TrainingDiverged, require_finite
from attn_train.eight_bit import SCALES
from attn_train.gradient_norms import GradientNorms
from attn_train.optimizer import learning_rate, optimizer_of, optimizer_state, restore_optimizer_state
from attn_train.precision import forward_precision, half_weights, validation_precision
from attn_train.process_group import Group
from attn_train.records import NullReporter, Reporter, Stop, StopFlag
from attn_train.sharded_checkpoint import Held, Parts, read_shards, read_whole, stored_tensors
from attn_train.tasks.base import (
    Dataset,
    after_update,
    auxiliary_losses,
    batch_weight,
    count_load,
    counting,
    derived,
    left_out,
    metrics_of,
    next_batch,
    on_host,
    position_of,
    require_measured,
    restore_position,
    to_device,
    validation_losses,
    validation_metrics,
)
from attn_train.weight_average import BestWeights, WeightAverage

Read = TypeVar("Read")
NAMED = 5
"""The number of weights that are named in a message."""
NO_DIGEST = torch.tensor([], dtype=torch.uint8)


@dataclass
class Throughput:
    """Seconds of training since the last metrics, without evaluation and checkpoints, and the token count then."""

    seconds: float = 0.0
    tokens: int = 0


class Trainer:
    """Trains `model` on a dataset as configured by `config`, on the device of the model.

    Without `checkpoints`, none are written. With a `group`, this worker computes its part of each batch; `rebuild` then
    creates a whole model of the same kind. A checkpoint of data with another `data_digest` is refused.

    The losses of a resumed run are bit for bit those of an uninterrupted one.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        config: TrainingConfig,
        *,
        checkpoints: Checkpoints | None = None,
        group: Group | None = None,
        rebuild: Callable[[], Any] | None = None,
        data_digest: bytes = b"",
    ) -> None:
        self.model = model
        self.config = config
        self._digest = torch.tensor(list(data_digest), dtype=torch.uint8)
        self.step = 0
        self.elapsed = 0.0
        self._checkpoints = checkpoints
        self._writer: AsyncCheckpoints | None = None
        self._group, self._rebuild = group or Group(), rebuild
        self._kept = self._group.set_up(model, config)
        self._optimizer = optimizer_of(self._kept, config.optimizer)
        self._trained = [parameter for parameter in self._kept.parameters() if parameter.requires_grad]
        self._device = self._trained[0].device
        self._halves = half_weights(model, config.precision, self._device)
        self._task = dataset.task(config)
        self._divergence, self._equal = Divergence(dataset, self._task), EqualRewards()
        self._width: int | None = getattr(getattr(model, "config", None), "hidden_size", None)
        ratio = config.optimizer.max_grad_norm_ratio
        self._norms = None if ratio is None else GradientNorms(ratio)
        decay = config.optimizer.ema_decay
        self._average = None if decay is None else WeightAverage(self._kept, decay)
        self._best = BestWeights(self._kept, config.evaluation)
        self._throughput = Throughput()
        self._saved_step: int | None = None
        self._began = False
        self._last: dict[str, Tensor] = {}
        self.resumed_from: Saved | None = None
        if checkpoints is not None:
            keep, writers = config.checkpoint.save_total_limit, self._group.writers
            self._writer = AsyncCheckpoints(checkpoints, keep, writers, leads=self._group.leads)

    @property
    def checkpoint_stops(self) -> Stops:
        """How long checkpoints blocked training."""
        return Stops() if self._writer is None else self._writer.stops

    def resume(self, report: Reporter | None = None) -> bool:
        """Restore the newest intact checkpoint; return False if there is none. Damaged checkpoints are reported.

        On the leading worker, `resumed_from` is set to the checkpoint.

        Raises `Unavailable` in all workers if one cannot access the checkpoints; the call can be repeated.
        """

        def damaged(found: Saved, error: CheckpointInvalid) -> None:
            problem = f"{error.reason}: the checkpoint of step {found.step} is damaged: {error.message}"
            (report or NullReporter()).log(f"{problem}; training continues from an earlier one")

        checkpoints = self._checkpoints
        if checkpoints is None:
            return False
        newest = self._read_by_all(lambda: checkpoints.newest_whole(damaged) if self._group.leads else None)
        step = self._group.agreed_step(-1 if newest is None else newest.step)
        if step < 0:
            return False
        with ExitStack() as opened:
            folder = self._read_by_all(lambda: opened.enter_context(checkpoints.opened(step)))
            self._restore(folder)
        self.resumed_from = newest
        return True

    def _read_by_all(self, read: Callable[[], Read]) -> Read:
        """Return the result of `read`, once all workers have read; raises in all of them if one failed."""
        try:
            found = read()
        except AttnError as error:
            require_no_failure(error, self._group.writers, Unavailable)
            raise
        require_no_failure(None, self._group.writers, Unavailable)
        return found

    def _restore(self, folder: Path) -> None:
        """Restore the state from a checkpoint's files in `folder`; each worker reads only the parts that it holds."""
        progress, stored = read_progress(folder), stored_tensors(folder)
        kept = {name: tensor.detach() for name, tensor in self._kept.named_parameters()}
        into: dict[str, dict[str, Tensor]] = {
            "weights": {name: kept.get(name, tensor) for name, tensor in _saved_tensors(self.model).items()}
        }
        trained = {name for name, tensor in self._kept.named_parameters() if tensor.requires_grad}
        for part in ("optimizer", "average", "best"):
            named = {key: (key.rpartition(":")[2], found) for key, found in stored.get(part, {}).items()}
            into[part] = {
                key: torch.empty_like(
                    kept[name] if found.dim() and not key.startswith(SCALES) else found,
                    dtype=found.dtype,
                    device=self._device,
                )
                for key, (name, found) in named.items()
                if name in trained
            }
        read_shards(folder, {part: self._group.held(own) for part, own in into.items()})
        parts = read_whole(folder, ("random", "loss", "position", "gradient_norms", "data", "best_loss"))
        if not torch.equal(parts.get("data", {}).get("digest", NO_DIGEST), self._digest):
            problem = "the data or the tokenizer have changed since the checkpoint was written: restore them"
            raise Incompatible(f"{problem}, or submit a new job", field="config.data")
        if self._average is not None:
            self._average.restore(into["average"])
        if self._best.wanted:
            self._best.restore(into["best"])
            self._best.restore_record(parts["best_loss"])
        if self._norms is not None:
            self._norms.restore(parts.get("gradient_norms", {}))
        restore_optimizer_state(self._kept, self._optimizer, into["optimizer"], self.config.optimizer)
        seed = partial(derived, self.config.seed + progress.step)
        restore_random_states(self._task.generator, self._group.own_random_states(parts["random"], seed))
        self._task.reinforce.restore(parts.get("loss", {}))
        restore_position(self._task, parts.get("position", {}))
        self.step, self.elapsed, self._saved_step = progress.step, progress.elapsed_seconds, progress.step

    def run(self, report: Reporter, stop: StopFlag) -> Stop | None:
        """Train to the last step and return None, or stop when asked to and return how.

        Raises `TrainingDiverged` if the loss is not finite, `CheckpointWriteFailed` if the last checkpoint cannot be
        written, which the next call tries again. If an earlier one cannot be, this is reported and the run goes on.
        """
        try:
            return self._run(report, stop)
        finally:
            # However the run ends, no checkpoint is being written afterwards.
            self._report_checkpoint(self._finished(report), report)

    def _run(self, report: Reporter, stop: StopFlag) -> Stop | None:
        self.model.train()
        if self.step == 0:
            torch.manual_seed(derived(self.config.seed, self._group.dropout_use()))
            if self._best.wanted:  # refused before anything is trained, not at the first measurement
                require_measured(self._task, self.validation_loss(1, report.heartbeat))
        while self.step < self.config.optimizer.steps and not self._best.waited_enough:
            asked = self._group.agreed(stop.get())
            if asked is not None:
                if asked is Stop.SAVE:
                    self._try_save(report)
                return asked
            self._one_step(report)
            if self._writer is not None:
                self._report_checkpoint(self._writer.ended(), report)
        self.save(report)
        return None

    def save(self, report: Reporter) -> None:
        """Write a checkpoint, unless the newest one is of this step, and return when it is complete.

        Raises `CheckpointWriteFailed`.
        """
        self._begin_save(report)
        written = self._finished(report)
        if written is not None and written.error is not None:
            raise written.error
        self._report_checkpoint(written, report)

    def _begin_save(self, report: Reporter) -> None:
        """Wait for an earlier checkpoint, then start to write one of this step in the background unless it exists."""
        if self._writer is None:
            return
        began = time.perf_counter()
        self._writer.stops.waits += self._writer.busy
        self._report_checkpoint(self._finished(report), report)
        if self._group.agreed_step(self._saved_step or 0) == self.step:
            return
        lasts = {name: last.item() for name, last in self._last.items()}
        for name, last in lasts.items():
            require_finite(name, last, self.step)
        if self._divergence.is_bad(lasts.get("loss", 0.0)):
            kept = "" if self._saved_step is None else f"; that of step {self._saved_step} is kept"
            report.log(f"no checkpoint at step {self.step}: the loss is that of a diverged model{kept}")
            return
        report.flush()
        self._writer.begin(Progress(step=self.step, elapsed_seconds=self.elapsed), self._state())
        self._writer.stops.seconds[-1] += time.perf_counter() - began

    def _finished(self, report: Reporter) -> Written | None:
        return None if self._writer is None else self._writer.finished(report.heartbeat)

    def _report_checkpoint(self, written: Written | None, report: Reporter) -> None:
        """Report the result of writing a checkpoint."""
        if written is None:
            return
        if written.error is not None:
            report.log(f"{written.error.reason}: {written.error.message}; the previous checkpoint is kept")
        elif written.saved is not None:
            self._saved_step = written.step
            if self._group.leads:
                report.checkpoint(written.step, written.saved.where, written.saved.size)

    def _state(self) -> Parts:
        """Return the contents of a checkpoint: tensors that only updates change are not copied, others are copies."""
        kept = dict(self._kept.named_parameters())
        saved = _saved_tensors(self.model)
        weights = {name: kept[name] if name in kept else tensor.clone() for name, tensor in saved.items()}
        parts: dict[str, Mapping[str, Held]] = {
            "weights": self._group.held(weights),
            "optimizer": self._group.held(optimizer_state(self._kept, self._optimizer)),
            "random": self._group.random_states(random_states(self._task.generator)),
        }
        if len(self._digest):
            parts["data"] = {"digest": self._digest}
        if loss := self._task.reinforce.state():
            parts["loss"] = dict(loss)
        if position := position_of(self._task):
            parts["position"] = {name: tensor.clone() for name, tensor in position.items()}
        if self._average is not None and (average := self._group.held(self._average.state())):
            parts["average"] = average
        if self._best.wanted:
            parts["best_loss"] = self._best.record()
        if best := self._group.held(self._best.state()):
            parts["best"] = best
        if self._norms is not None:
            parts["gradient_norms"] = dict(self._norms.state())
        return parts

    def validation_loss(self, batches: int, on_batch: Callable[[], None] = lambda: None) -> float | None:
        """Return the mean loss, in nats per token, over `batches` validation batches; None if there are too few data.

        `on_batch` is called after each batch.
        """
        with self._exported(), validation_precision(self.config.precision, self._device):
            return self._task.validation_loss(self.model, batches, on_batch)

    def whole_model(self) -> nn.Module | None:
        """Return the model with all its weights on the leading worker, None on the others. A collective.

        With `ema_decay`, the weights are replaced by their averages for good, or with `load_best_model_at_end` by those
        of the best measurement: only to be called at the end of a run.
        """
        self._wait_for_copy()
        if self._best.state():
            self._best.exchange()
            return self._gathered()
        if self._average is not None:
            self._average.exchange()
            self._average = None
        return self._gathered()

    def _wait_for_copy(self) -> float:
        """Wait until a checkpoint in progress has copied the weights, which may then change; return the seconds."""
        return 0.0 if self._writer is None else self._writer.wait_for_copy()

    def _exported(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are those to export: with `ema_decay`, their averages."""
        self._wait_for_copy()
        return nullcontext() if self._average is None else self._average.in_place()

    def _finished_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are those of `whole_model`."""
        return self._best.in_place() if self._best.state() else self._exported()

    def _gathered(self) -> nn.Module | None:
        return self._group.whole_model(self.model, _saved_tensors(self.model), self._rebuild)

    def _one_step(self, report: Reporter) -> None:
        began = time.perf_counter()
        rate = learning_rate(self.step, self.config.optimizer, self._width)
        loss, norm = self._update(rate, report)
        self.step += 1
        # An update by a gradient that is no number leaves weights that are none; with `_norms`, it is skipped.
        self._last = {"loss": loss} | ({"gradient norm": norm} if self._norms is None else {})
        report.heartbeat()
        last = self.step == self.config.optimizer.steps
        measured = last or self.step % self.config.evaluation.logging_steps == 0
        values = {"loss": loss.item(), "learning_rate": rate, "gradient_norm": norm.item()} if measured else {}
        if measured and self._norms is not None:
            values["skipped_steps"] = float(self._norms.skipped)
        seconds = time.perf_counter() - began
        self.elapsed += seconds
        self._throughput.seconds += seconds
        if measured:
            values |= self._speed() | metrics_of(self._task)
            self._divergence.measured(values["loss"], values["gradient_norm"], self.step, last=last)
        if last or self.step % self.config.evaluation.eval_steps == 0:
            values |= self._validation_losses(report)
        if last or self._best.waited_enough:
            values |= self._final_metrics(report)
        if values:
            report.metrics(self.step, values)
        if (notice := self._equal.measured(values, self.step)) is not None:
            report.log(notice)
        if self.step % self.config.checkpoint.save_steps == 0 and not last:
            self._begin_save(report)

    def _validation_losses(self, report: Reporter) -> Mapping[str, float]:
        """Return the validation loss; with several validation sets, their mean and the loss of each by name."""
        batches = self.config.evaluation.eval_batches
        with self._exported(), validation_precision(self.config.precision, self._device):
            found = validation_losses(self._task, self.model, batches, report.heartbeat)
            if self._best.wanted:
                self._take_best(found)
            named = {f"validation_loss_{name}": loss for name, loss in found.items()} if len(found) > 1 else {}
            named |= validation_metrics(self._task, self.model, batches, report.heartbeat)
        named |= {"best_validation_loss": self._best.loss} if self._best.wanted else {}
        missing = left_out(self._task)
        named |= {"validation_left_out": float(missing)} if missing else {}
        return ({"validation_loss": sum(found.values()) / len(found)} if found else {}) | named

    def _take_best(self, found: Mapping[str, float]) -> None:
        require_measured(self._task, found or None)
        loss = sum(found.values()) / len(found)
        self._best.measured(loss, lower=self._group.agreed_choice(chosen=loss < self._best.loss))

    def _final_metrics(self, report: Reporter) -> Mapping[str, float]:
        """Return the final metrics of the task; if they fail, this is only logged, so that the model is not lost."""
        try:
            with self._finished_weights(), validation_precision(self.config.precision, self._device):
                whole = self._gathered()
                return {} if whole is None else self._task.final_metrics(whole, report.heartbeat)
        except Exception as error:  # noqa: BLE001 -- whatever a measurement raises, the model is trained
            report.log(f"the final evaluation failed: {type(error).__name__}: {error}; the model is kept")
            return {}

    def _update(self, rate: float, report: Reporter) -> tuple[Tensor, Tensor]:
        loss = self._accumulated(report)
        if not self._began:
            self._began = True
            self._say_untrained(report)
        limit = self.config.optimizer.max_grad_norm or math.inf
        self._group.finish_gradients()
        norm = self._group.clip(self._trained, limit)
        waited = self._wait_for_copy()
        self.elapsed -= waited
        self._throughput.seconds -= waited
        if not self._skips(loss, norm, report):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            if self._average is not None:
                self._average.update()
        self._optimizer.zero_grad(set_to_none=True)
        if adapter_of(self.model) is None:
            update_router_biases(self.model)
            after_update(self.model, self._group.summed)
        self._group.updated(self.step)
        return loss, norm

    def _say_untrained(self, report: Reporter) -> None:
        """Name the weights without a gradient, after the first batches of a run."""
        named = self._kept.named_parameters()
        names = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if names:
            some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            why = "the loss does not depend on them, or no token of this step used them, as with experts"
            report.log(f"{len(names)} weights have no gradient in the first step: {some} ({why})")

    def _skips(self, loss: Tensor, norm: Tensor, report: Reporter) -> bool:
        """Whether to skip the update as its gradient is too large; counts and logs it. All workers decide alike."""
        if self._norms is None:
            return False
        # Checked at every step, as NaN losses would otherwise be noticed only in steps with metrics.
        require_finite("loss", loss.item(), self.step + 1)
        length, limit = norm.item(), self._norms.limit()
        skipped = self._group.agreed_choice(chosen=self._norms.too_large(length))
        self._norms.add(length, skipped=skipped)
        if skipped:
            reason = "not finite" if not math.isfinite(length) else f"more than {limit:.4g}"
            report.log(f"step {self.step + 1} is skipped: its gradient norm {length:.4g} is {reason}")
        return skipped

    def _accumulated(self, report: Reporter) -> Tensor:
        """Compute the batches of a step and accumulate their gradients; return the mean loss, as of one large batch."""
        count = self.config.optimizer.gradient_accumulation_steps
        batches = [next_batch(self._task, self.model, report.heartbeat) for _ in range(count)]
        # At least 1, as all targets of a step may be ignored: its loss is 0 then.
        everything = max(1, sum(batch_weight(self._task, batch) for batch in batches))
        total = torch.zeros((), device=self._device)
        if self._halves is not None:
            self._halves.refresh()
        parts = [self._group.share(batch) for batch in batches]
        if len(parts) > 1:
            count_load(self.model, lambda: [self._loss(part, 1.0) for part in parts])
        for part in parts:
            with self._group.updating():
                loss = self._loss(part, batch_weight(self._task, part) / everything)
                loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return self._group.summed(total)

    def _loss(self, part: tuple[Tensor, ...], share: float) -> Tensor:
        """Return the loss of a part of a step's batch, with the auxiliary losses; `share` is its share of the step."""
        there = to_device(part, self._device, on_host(self._task))
        same = self.config.on_policy.batch_invariant
        numerics = forward_precision(self.config.precision, self._device, self._halves, batch_invariant=same)
        with counting(self.model, there), numerics:
            loss, extra = self._task.loss(self.model, there) * share, auxiliary_losses(self.model, share)
            return loss + extra if isinstance(extra, Tensor) else loss

    def _speed(self) -> dict[str, float]:
        speed = (self._task.tokens - self._throughput.tokens) / self._throughput.seconds
        self._throughput = Throughput(tokens=self._task.tokens)
        return {"tokens_per_second": speed, "elapsed_seconds": self.elapsed}

    def _try_save(self, report: Reporter) -> None:
        """Like `save`, but a failure is only reported."""
        try:
            self._begin_save(report)
        except TrainingDiverged as error:
            report.log(f"{error.reason}: {error.message}; the previous checkpoint is kept")
        self._report_checkpoint(self._finished(report), report)


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, shared ones once; with an adapter, only its parameters."""
    if adapter_of(model) is not None:
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = dict(model.named_parameters())
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    return {**parameters, **buffers}
