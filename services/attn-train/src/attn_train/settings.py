"""The operator's settings of the training service, and the paths of the files of jobs."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_schema.cores import usable_cores
from attn_schema.home import models_folder

MAX_CONCURRENT_JOBS = "ATTN_TRAIN_JOBS"
DATA_ROOTS = "ATTN_TRAIN_DATA"
THREADS = "ATTN_TRAIN_THREADS"
STALL_TIMEOUT = "ATTN_TRAIN_STALL_TIMEOUT"
GPUS = "ATTN_TRAIN_GPUS"
LOG_TO = "ATTN_TRAIN_LOG_TO"
WANDB = "wandb"
"""The only value of ATTN_TRAIN_LOG_TO, and the name of the library that it needs."""
REMOVED = ".removed-"
"""Prefix of the folders of deleted jobs; job ids cannot contain a dot."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of the training service.

    At most `max_concurrent_jobs` jobs train at once; others are queued. Each worker uses `threads` CPU threads and, on
    a CUDA device, takes the share `gpus` of a GPU. A worker without progress for `stall_timeout` seconds is
    replaced. Paths that callers name must be below one of `data_roots`; for None see `access.Access`. With `log_to`
    "wandb", each job is also written as a W&B run.
    """

    max_concurrent_jobs: int = 1
    threads: int = 1
    stall_timeout: int = 600
    gpus: float = 1.0
    data_roots: tuple[Path, ...] | None = None
    log_to: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TrainSettings:
        """Read ATTN_TRAIN_JOBS, ATTN_TRAIN_THREADS, ATTN_TRAIN_STALL_TIMEOUT, ATTN_TRAIN_GPUS, ATTN_TRAIN_DATA and
        ATTN_TRAIN_LOG_TO.

        ATTN_TRAIN_DATA lists folders, separated as in PATH. Raises `InvalidValue` for invalid numbers, and for a value
        of ATTN_TRAIN_LOG_TO that is unknown or whose library is not installed.
        """
        roots = environ.get(DATA_ROOTS)
        return cls(
            max_concurrent_jobs=_count(environ, MAX_CONCURRENT_JOBS, 1),
            threads=_count(environ, THREADS, usable_cores()),
            stall_timeout=_count(environ, STALL_TIMEOUT, 600),
            gpus=_share(environ, GPUS),
            data_roots=None if roots is None else tuple(Path(root) for root in roots.split(os.pathsep) if root),
            log_to=_log_to(environ),
        )


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InvalidValue.of(name, text, "a whole number from 1")
    return int(text)


def _share(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name, "1")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidValue.of(name, text, "above 0, at most 1")
    return share


def _log_to(environ: Mapping[str, str]) -> str | None:
    target = environ.get(LOG_TO) or None
    if target not in (None, WANDB):
        raise InvalidValue.of(LOG_TO, target, WANDB)
    if target is not None and importlib.util.find_spec(WANDB) is None:
        text = f"{LOG_TO}: {target!r} needs a library that is not installed: pip install 'attn-train[{WANDB}]'"
        raise InvalidValue(text, field=LOG_TO, given=target)
    return target


@dataclass(frozen=True)
class Layout:
    """The paths of jobs and models below the home folder."""

    home: Path

    @property
    def data(self) -> Path:
        """The folder of data files that tenants may name by path."""
        return self.home / "data"

    def job(self, job_id: str) -> Path:
        """Return the folder of one job."""
        return self.home / "jobs" / job_id

    def removed(self, job_id: str) -> Path:
        """Return a new path to which the folder of a deleted job is moved."""
        return self.home / "jobs" / f"{REMOVED}{job_id}-{secrets.token_hex(4)}"

    def sweep(self) -> None:
        """Delete the folders of deleted jobs."""
        for folder in (self.home / "jobs").glob(f"{REMOVED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def checkpoints(self, job_id: str) -> Path:
        """Return the folder of a job's checkpoints."""
        return self.job(job_id) / "checkpoints"

    def staged(self, job_id: str) -> Path:
        """Return the folder for files in transfer of checkpoints that are kept in an object store."""
        return self.job(job_id) / "staged"

    def worker_lock(self, job_id: str) -> Path:
        """Return the lock file that the training process holds."""
        return self.job(job_id) / "worker.lock"

    def model(self, job_id: str) -> Path:
        """Return the folder of a job's finished model."""
        return models_folder(self.home) / job_id
