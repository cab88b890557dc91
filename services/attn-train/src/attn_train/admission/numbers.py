"""Checks of the numbers of a specification."""

from __future__ import annotations

import math
from collections.abc import Callable

from attn_core.errors import InvalidValue

from attn_train.spec import TrainingSpec

Check = tuple[str, Callable[[TrainingSpec], float], Callable[[float], bool], str]


def _whole(field: str, read: Callable[[TrainingSpec], float], least: int) -> Check:
    return field, read, lambda value: value >= least, f"a whole number from {least}"


CHECKS: tuple[Check, ...] = (
    _whole("model.width", lambda spec: spec.model.width, 1),
    _whole("model.layers", lambda spec: spec.model.layers, 1),
    _whole("model.heads", lambda spec: spec.model.heads, 1),
    _whole("model.context_length", lambda spec: spec.model.context, 1),
    _whole("model.kv_heads", lambda spec: _given(spec.model.key_value_heads), 1),
    _whole("model.head_size", lambda spec: _given(spec.model.head_size), 1),
    _whole("model.feed_forward_size", lambda spec: _given(spec.model.hidden), 1),
    ("model.dropout", lambda spec: spec.model.dropout, lambda v: 0 <= v < 1, "from 0, below 1"),
    ("data.validation_fraction", lambda spec: spec.data.validation, lambda v: 0 <= v < 1, "from 0, below 1"),
    _whole("optimizer.steps", lambda spec: spec.optimizer.steps, 1),
    _whole("optimizer.batch_size", lambda spec: spec.optimizer.batch, 1),
    ("optimizer.learning_rate", lambda spec: spec.optimizer.learning_rate, lambda v: v > 0, "a number above 0"),
    ("optimizer.weight_decay", lambda spec: spec.optimizer.weight_decay, lambda v: v >= 0, "a number from 0"),
    ("optimizer.beta1", lambda spec: spec.optimizer.beta1, lambda v: 0 <= v < 1, "from 0, below 1"),
    ("optimizer.beta2", lambda spec: spec.optimizer.beta2, lambda v: 0 <= v < 1, "from 0, below 1"),
    ("optimizer.gradient_clip", lambda spec: spec.optimizer.clip, lambda v: v >= 0, "a number from 0"),
    _whole("checkpoint.interval_steps", lambda spec: spec.checkpoint.interval, 1),
    _whole("checkpoint.keep", lambda spec: spec.checkpoint.keep, 1),
    _whole("checkpoint.evaluation_interval_steps", lambda spec: spec.checkpoint.evaluation_interval, 1),
    _whole("checkpoint.evaluation_batches", lambda spec: spec.checkpoint.evaluation_batches, 1),
    _whole("max_failures", lambda spec: spec.max_failures, 0),
    ("workers", lambda spec: spec.workers, lambda v: v == 1, "1; more are not offered yet"),
)


def check_numbers(spec: TrainingSpec) -> None:
    """Raises InvalidValue for the first number out of its range, with its field as on the wire."""
    for field, read, fits, allowed in CHECKS:
        value = read(spec)
        if not math.isfinite(value) or not fits(value):
            raise InvalidValue.of(f"spec.{field}", value, allowed)
    optimizer = spec.optimizer
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        allowed = f"from 0 to the learning rate {optimizer.learning_rate}"
        raise InvalidValue.of("spec.optimizer.min_learning_rate", optimizer.min_learning_rate, allowed)
    if not 0 <= optimizer.warmup <= optimizer.steps:
        raise InvalidValue.of("spec.optimizer.warmup_steps", optimizer.warmup, f"from 0 to the {optimizer.steps} steps")


def _given(size: int | None) -> int:
    """A size left to the default is fine."""
    return 1 if size is None else size
