"""The checks that a training configuration must pass before a job is accepted."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from attn_core.errors import AlreadyExists, InvalidValue
from attn_schema.training import TrainingConfig

from attn_train.data.load import IMAGES, LABELS, MASKED, PAIRS, TAGS, TEXT, data_kind_of, tokenizer_folder
from attn_train.data.synthetic import TASKS
from attn_train.data.token_shards.inputs import has_rows
from attn_train.data_checks import (
    check_conversations,
    check_images,
    check_labels,
    check_masked,
    check_pairs,
    check_prepared,
    check_tags,
    check_text,
)
from attn_train.model import check_model
from attn_train.settings import Layout
from attn_train.tasks.distillation import check_teacher
from attn_train.tasks.seq2seq import require_bleu

CHECKS = {
    PAIRS: check_pairs,
    TEXT: check_text,
    MASKED: check_masked,
    TAGS: check_tags,
    LABELS: check_labels,
    IMAGES: check_images,
}
"""The function that checks a dataset, by the kind of data."""
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_config(config: TrainingConfig, *, home: Path) -> None:
    """Check `config`, and raise an error for the first problem that is found.

    Takes milliseconds to seconds; no training is started. What a caller may name is checked by `Access`.
    """
    model, data = config.model, config.data
    if data.max_pairs and not model.is_encoder_decoder and data.name not in TASKS:
        raise InvalidValue.of(
            "config.data.max_pairs",
            data.max_pairs,
            "0: the limit applies only to encoder-decoder models and synthetic tasks",
        )
    if data.languages and not model.is_encoder_decoder:
        raise InvalidValue.of(
            "config.data.languages", data.languages, "none: languages apply only to encoder-decoder models"
        )
    for name in ("columns", "skip_broken"):
        if getattr(data, name) and not (data.path and has_rows(Path(data.path))):
            allowed = "none without files of rows: JSON, tables, Parquet or Arrow"
            raise InvalidValue.of(f"config.data.{name}", getattr(data, name), allowed)
    if data.prepared:
        check_prepared(config)
    elif not data.dataset:
        raise InvalidValue.of("config.data.dataset", "", "the name of a dataset, or a path on the server")
    else:
        CHECKS[data_kind_of(model)](data, home=home)
    if data.format != "text" and not data.prepared:
        check_conversations(config, home)
    if config.objective.teacher is not None:
        _check_teacher(config, home)
    check_model(config, home)
    if config.evaluation.bleu_sentences:
        require_bleu()


def _check_teacher(config: TrainingConfig, home: Path) -> None:
    if data_kind_of(config.model) != TEXT or config.data.name in TASKS:
        raise InvalidValue.of(
            "config.objective.teacher",
            config.objective.teacher,
            "none: a teacher is supported only for training on texts and chats",
        )
    prepared = config.data.sources
    folder = Path(prepared[0].path if prepared else tokenizer_folder(config.data.tokenizer, home))
    if not (folder / "tokenizer.json").is_file():
        allowed = "none with a tokenizer that is learned from the data: set data.tokenizer to the teacher too"
        raise InvalidValue.of("config.objective.teacher", config.objective.teacher, allowed)
    check_teacher(config, home, folder)


def check_job_id(job_id: str) -> None:
    """Raise `InvalidValue` for an id that cannot be used as the name of a folder and of a model."""
    if not JOB_ID.fullmatch(job_id):
        raise InvalidValue.of("job_id", job_id, "letters, digits, '-' and '_', at most 64 characters")


def check_model_name_is_free(job_id: str, home: Path) -> None:
    """Raise `AlreadyExists` if a model with the name of this job exists already."""
    if Layout(home).model(job_id).exists():
        raise AlreadyExists(f"a model {job_id!r} exists already; choose another job id", job=job_id)


def new_job_id(mechanism: str) -> str:
    """Return a new random id that begins with the name of the mechanism or model family."""
    word = re.sub(r"[^A-Za-z0-9_-]+", "-", mechanism.rpartition("/")[2])[:48]
    return f"{word}-{secrets.token_hex(4)}"
