"""All checks of a specification, before a job is accepted."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from attn_core.errors import AlreadyExists, InvalidValue

from attn_train.admission.images import check_images
from attn_train.admission.model import check_model
from attn_train.admission.numbers import check_numbers
from attn_train.admission.sourced import check_pairs
from attn_train.admission.tags import check_tags
from attn_train.admission.text import check_masked, check_text
from attn_train.data import IMAGES, MASKED, PAIRS, TAGS, TEXT, subject_of
from attn_train.layout import Layout
from attn_train.settings import TrainSettings
from attn_train.spec import TrainingSpec

CHECKS = {PAIRS: check_pairs, TEXT: check_text, MASKED: check_masked, TAGS: check_tags, IMAGES: check_images}
"""Of data, by what is learned from."""
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_spec(spec: TrainingSpec, *, home: Path, settings: TrainSettings, local: bool) -> None:
    """Raises the error of the first thing wrong with `spec`; `local` says whether the caller is on this machine.

    Takes milliseconds to seconds, and starts nothing.
    """
    check_numbers(spec)
    CHECKS[subject_of(spec.model)](spec.data, home=home, settings=settings, local=local)
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
