"""All checks of a training configuration, before a job is accepted."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from attn_core.errors import AlreadyExists, InvalidValue

from attn_train.data.load import IMAGES, MASKED, PAIRS, TAGS, TEXT, data_kind_of
from attn_train.data.synthetic import TASKS
from attn_train.data_checks import check_images, check_masked, check_pairs, check_tags, check_text
from attn_train.model_checks import check_model
from attn_train.optimizer import PRECISIONS
from attn_train.settings import Layout, TrainSettings
from attn_train.spec import ModelSpec, SourceModelSpec, TrainingSpec

SizeCheck = tuple[str, Callable[[ModelSpec], float], Callable[[float], bool], str]
Check = tuple[str, Callable[[TrainingSpec], float], Callable[[float], bool], str]


def _size(field: str, read: Callable[[ModelSpec], float], least: int) -> SizeCheck:
    return field, read, lambda value: value >= least, f"a whole number from {least}"


def _whole(field: str, read: Callable[[TrainingSpec], float], least: int) -> Check:
    return field, read, lambda value: value >= least, f"a whole number from {least}"


DECODER: tuple[SizeCheck, ...] = (
    _size("model.width", lambda model: model.hidden_size, 1),
    _size("model.layers", lambda model: model.num_layers, 1),
    _size("model.heads", lambda model: model.num_heads, 1),
    _size("model.context_length", lambda model: model.max_seq_len, 1),
    _size("model.kv_heads", lambda model: _given(model.num_kv_heads), 1),
    _size("model.head_size", lambda model: _given(model.head_dim), 1),
    _size("model.feed_forward_size", lambda model: _given(model.intermediate_size), 1),
    _size("model.experts", lambda model: _given(model.experts), 1),
    _size("model.experts_per_token", lambda model: _given(model.experts_per_token), 1),
    ("model.balance", lambda model: model.router_aux_loss_coef, lambda v: 0 <= v < math.inf, "a finite number from 0"),
    ("model.dropout", lambda model: model.dropout, lambda v: 0 <= v < 1, "from 0, below 1"),
)

NUMBER_CHECKS: tuple[Check, ...] = (
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
    for field, read, fits_model, allowed in NUMBER_CHECKS:
        _check(field, read(spec), fits_model, allowed)
    if spec.precision not in PRECISIONS:
        raise InvalidValue.of("spec.precision", spec.precision, " or ".join(repr(name) for name in PRECISIONS))
    if isinstance(spec.model, ModelSpec):
        for field, size, fits_model, allowed in DECODER:
            _check(field, size(spec.model), fits_model, allowed)
    if not isinstance(spec.model, SourceModelSpec):
        for field, given in {
            "optimizer.label_smoothing": spec.optimizer.label_smoothing,
            "checkpoint.bleu_sentences": spec.checkpoint.bleu_sentences,
            "data.most_pairs": 0 if spec.data.name in TASKS else spec.data.max_pairs,
        }.items():
            _check(field, given, lambda value: value == 0, "0, as the model has no source")
    optimizer = spec.optimizer
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        allowed = f"from 0 to the learning rate {optimizer.learning_rate}"
        raise InvalidValue.of("spec.optimizer.min_learning_rate", optimizer.min_learning_rate, allowed)
    if not 0 <= optimizer.warmup <= optimizer.steps:
        raise InvalidValue.of("spec.optimizer.warmup_steps", optimizer.warmup, f"from 0 to the {optimizer.steps} steps")


def _check(field: str, value: float, fits_model: Callable[[float], bool], allowed: str) -> None:
    if not math.isfinite(value) or not fits_model(value):
        raise InvalidValue.of(f"spec.{field}", value, allowed)


def _given(size: int | None) -> int:
    """A size left to the default is fine."""
    return 1 if size is None else size


CHECKS = {PAIRS: check_pairs, TEXT: check_text, MASKED: check_masked, TAGS: check_tags, IMAGES: check_images}
"""Of data, by what is learned from."""
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_spec(spec: TrainingSpec, *, home: Path, settings: TrainSettings, local: bool) -> None:
    """Raises the error of the first thing wrong with `spec`; `local` says whether the caller is on this machine.

    Takes milliseconds to seconds, and starts nothing.
    """
    check_numbers(spec)
    CHECKS[data_kind_of(spec.model)](spec.data, home=home, settings=settings, local=local)
    check_model(spec, home)


def check_job_id(job_id: str) -> None:
    """Raises InvalidValue for an id that cannot be the name of a folder and a model."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidValue.of("job_id", job_id, "letters, digits, '-' and '_', at most 64 characters")


def check_model_name_is_free(job_id: str, home: Path) -> None:
    """Raises AlreadyExists if the finished model would replace another."""
    if Layout(home).model(job_id).exists():
        raise AlreadyExists(f"there is a model {job_id!r} already; choose another job id", job=job_id)


def new_job_id(mechanism: str) -> str:
    """An id nobody has, which says what is trained."""
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", mechanism.rpartition("/")[2])[:48]
    return f"{word}-{secrets.token_hex(4)}"
