"""Checks of the numbers of a specification."""

from __future__ import annotations

import math
from collections.abc import Callable

from attn_core.errors import InvalidValue

from attn_train.loop.precision import PRECISIONS
from attn_train.spec import ModelSpec, SourceModelSpec, TrainingSpec
from attn_train.synthetic import TASKS

SizeCheck = tuple[str, Callable[[ModelSpec], float], Callable[[float], bool], str]
Check = tuple[str, Callable[[TrainingSpec], float], Callable[[float], bool], str]


def _size(field: str, read: Callable[[ModelSpec], float], least: int) -> SizeCheck:
    return field, read, lambda value: value >= least, f"a whole number from {least}"


def _whole(field: str, read: Callable[[TrainingSpec], float], least: int) -> Check:
    return field, read, lambda value: value >= least, f"a whole number from {least}"


DECODER: tuple[SizeCheck, ...] = (
    _size("model.width", lambda model: model.width, 1),
    _size("model.layers", lambda model: model.layers, 1),
    _size("model.heads", lambda model: model.heads, 1),
    _size("model.context_length", lambda model: model.context, 1),
    _size("model.kv_heads", lambda model: _given(model.key_value_heads), 1),
    _size("model.head_size", lambda model: _given(model.head_size), 1),
    _size("model.feed_forward_size", lambda model: _given(model.hidden), 1),
    _size("model.experts", lambda model: _given(model.experts), 1),
    _size("model.experts_per_token", lambda model: _given(model.experts_per_token), 1),
    ("model.balance", lambda model: model.balance, lambda v: 0 <= v < math.inf, "a finite number from 0"),
    ("model.dropout", lambda model: model.dropout, lambda v: 0 <= v < 1, "from 0, below 1"),
)

CHECKS: tuple[Check, ...] = (
    ("data.validation_fraction", lambda spec: spec.data.validation, lambda v: 0 <= v < 1, "from 0, below 1"),
    _whole("optimizer.steps", lambda spec: spec.optimizer.steps, 1),
    _whole("optimizer.batch_size", lambda spec: spec.optimizer.batch, 1),
    ("optimizer.learning_rate", lambda spec: spec.optimizer.learning_rate, lambda v: v > 0, "a number above 0"),
    ("optimizer.weight_decay", lambda spec: spec.optimizer.weight_decay, lambda v: v >= 0, "a number from 0"),
    ("optimizer.beta1", lambda spec: spec.optimizer.beta1, lambda v: 0 <= v < 1, "from 0, below 1"),
    ("optimizer.beta2", lambda spec: spec.optimizer.beta2, lambda v: 0 <= v < 1, "from 0, below 1"),
    ("optimizer.gradient_clip", lambda spec: spec.optimizer.clip, lambda v: v >= 0, "a number from 0"),
    ("optimizer.label_smoothing", lambda spec: spec.optimizer.label_smoothing, lambda v: 0 <= v < 1, "from 0, below 1"),
    _whole("checkpoint.bleu_sentences", lambda spec: spec.checkpoint.bleu_sentences, 0),
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
        _check(field, read(spec), fits, allowed)
    if spec.precision not in PRECISIONS:
        raise InvalidValue.of("spec.precision", spec.precision, " or ".join(repr(name) for name in PRECISIONS))
    if isinstance(spec.model, ModelSpec):
        for field, size, fits, allowed in DECODER:
            _check(field, size(spec.model), fits, allowed)
    if not isinstance(spec.model, SourceModelSpec):
        for field, given in {
            "optimizer.label_smoothing": spec.optimizer.label_smoothing,
            "checkpoint.bleu_sentences": spec.checkpoint.bleu_sentences,
            "data.most_pairs": 0 if spec.data.name in TASKS else spec.data.most_pairs,
        }.items():
            _check(field, given, lambda value: value == 0, "0, as the model has no source")
    optimizer = spec.optimizer
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        allowed = f"from 0 to the learning rate {optimizer.learning_rate}"
        raise InvalidValue.of("spec.optimizer.min_learning_rate", optimizer.min_learning_rate, allowed)
    if not 0 <= optimizer.warmup <= optimizer.steps:
        raise InvalidValue.of("spec.optimizer.warmup_steps", optimizer.warmup, f"from 0 to the {optimizer.steps} steps")


def _check(field: str, value: float, fits: Callable[[float], bool], allowed: str) -> None:
    if not math.isfinite(value) or not fits(value):
        raise InvalidValue.of(f"spec.{field}", value, allowed)


def _given(size: int | None) -> int:
    """A size left to the default is fine."""
    return 1 if size is None else size
