"""Checkpoints of a run: folders of safetensors and JSON files, written atomically by one or several workers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from attn_core.errors import AttnError, CheckpointInvalid, CheckpointWriteFailed
from attn_models.weights import read_manifest, staged_folder, verify_manifest
from torch import Tensor

from attn_train.collectives import all_gather_texts, leads, require_no_write_failure
from attn_train.sharded_checkpoint import Parts, read_whole, write_shards

NAME = re.compile(r"step-(\d{9})")
PROGRESS_NAME = "progress.json"
WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run: the number of updates done, and the seconds spent on them."""

    step: int
    elapsed_seconds: float


class Saved(Protocol):
    """A complete checkpoint: its step, its path or URL, its total size in bytes, and when it was written."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def where(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def written(self) -> datetime: ...  # noqa: D102


class Checkpoints(Protocol):
    """The checkpoints of one run, on disk or in an object store. Only one attempt of the job may write at a time."""

    def newest(self) -> Saved | None:
        """Return the complete checkpoint of the highest step."""
        ...

    def newest_whole(self, damaged: Callable[[Saved, CheckpointInvalid], None]) -> Saved | None:
        """Return the checkpoint of the highest step whose files match its manifest; None if there is none.

        Newer checkpoints that are damaged are passed to `damaged`, and no longer count as checkpoints.
        """
        ...

    def opened(self, step: int) -> AbstractContextManager[Path]:
        """A context manager that gives a local folder with the files of the checkpoint of a step, on every worker."""
        ...

    def write(self, progress: Progress, parts: Parts, group: dist.ProcessGroup | None = None) -> Saved:
        """Write a checkpoint; it is complete and flushed to disk when this returns.

        A collective: each worker of `group` calls it and writes the tensors that it holds; None means a single worker.
        Any number and layout of workers can read it. Raises `CheckpointWriteFailed` in all workers if one fails; older
        checkpoints are then untouched, and no partial checkpoint is left.
        """
        ...

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints."""
        ...

    def sweep(self) -> None:
        """Remove the files that killed writers left behind; only for the process that may write."""
        ...

    def remove(self) -> None:
        """Remove all checkpoints of the run; no process may write any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def where(self) -> str:
        """The path of the folder."""
        return str(self.path)

    @property
    def size(self) -> int:
        """The size of all its files in bytes."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def written(self) -> datetime:
        """The time at which it was written."""
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)


class CheckpointFolder:
    """The checkpoints of one run in a folder that all its workers can access at the same path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[SavedCheckpoint]:
        """Return all complete checkpoints, oldest first."""
        names = sorted(self.path.iterdir()) if self.path.is_dir() else []
        matches = ((path, NAME.fullmatch(path.name)) for path in names)
        return [SavedCheckpoint(path=path, step=int(match[1])) for path, match in matches if match]

    def of_step(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.path / step_name(step)

    @contextmanager
    def opened(self, step: int) -> Iterator[Path]:
        """See `Checkpoints.opened`."""
        yield self.of_step(step)

    def newest(self) -> SavedCheckpoint | None:
        """Return the complete checkpoint of the highest step."""
        return next(reversed(self.complete()), None)

    def newest_whole(self, damaged: Callable[[SavedCheckpoint, CheckpointInvalid], None]) -> SavedCheckpoint | None:
        """See `Checkpoints.newest_whole`; damaged checkpoints are renamed to `.damaged-NAME`."""
        for found in reversed(self.complete()):
            try:
                require_whole(found.path)
            except CheckpointInvalid as error:
                found.path.rename(self.path / f".damaged-{found.path.name}")
                damaged(found, error)
            else:
                return found
        return None

    def write(self, progress: Progress, parts: Parts, group: dist.ProcessGroup | None = None) -> SavedCheckpoint:
        """See `Checkpoints.write`."""
        target = self.of_step(progress.step)
        failure: AttnError | None = None
        try:
            if leads(group):
                _write_first(target, progress, parts, group)
            else:
                stage = all_gather_texts("", group)[0]
                if not stage:
                    raise OSError("the leading worker could not create the folder")
                write_shards(Path(stage), parts, group)
        except AttnError as error:
            failure = error
        except OSError as error:
            failure = CheckpointWriteFailed.of(target, error)
        require_no_write_failure(failure, target, group)
        return SavedCheckpoint(path=target, step=progress.step)

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints."""
        for checkpoint in self.complete()[:-keep]:
            # Renaming it first is atomic: it no longer counts as a checkpoint even if the removal is interrupted.
            doomed = checkpoint.path.rename(self.path / f".removed-{checkpoint.path.name}")
            shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """See `Checkpoints.sweep`."""
        for path in self.path.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """See `Checkpoints.remove`."""
        shutil.rmtree(self.path, ignore_errors=True)


def _write_first(target: Path, progress: Progress, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """The leading worker's part of a write: the folder, its own files, and the manifest once all files are written."""
    announced = False
    try:
        with staged_folder(target) as stage:
            all_gather_texts(str(stage), group)
            announced = True
            write_shards(stage, parts, group)
            write_progress(stage, progress)
    finally:
        if not announced:
            all_gather_texts("", group)


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:09d}"


def write_progress(folder: Path, progress: Progress) -> None:
    """Write the progress as JSON into the folder of a checkpoint."""
    facts = {"format": 2, "step": progress.step, "elapsed_seconds": progress.elapsed_seconds}
    (folder / PROGRESS_NAME).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """Read the progress from the folder of a checkpoint that has been verified."""
    facts = json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
    return Progress(step=facts["step"], elapsed_seconds=facts["elapsed_seconds"])


def require_whole(path: Path) -> None:
    """Raise `CheckpointInvalid` if a file of a checkpoint is missing or does not match the manifest."""
    records = read_manifest(path)
    if records is None:
        raise CheckpointInvalid.of(path, "has no manifest")
    require_parts(path, records)
    verify_manifest(path, records)


def require_parts(path: object, names: Mapping[str, object]) -> None:
    """Raise `CheckpointInvalid` if the file names of a checkpoint lack the progress file or the weights."""
    if PROGRESS_NAME not in names:
        raise CheckpointInvalid.of(path, f"has no {PROGRESS_NAME} in its manifest")
    if not any(name.startswith(WEIGHTS) for name in names):
        raise CheckpointInvalid.of(path, f"has no {WEIGHTS} in its manifest")


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """Read the progress and the full tensors of all parts of a checkpoint, on the CPU.

    Raises `CheckpointInvalid` if a file is missing or does not match the manifest.
    """
    require_whole(path)
    return read_progress(path), read_whole(path)


def random_states(data: torch.Generator) -> dict[str, Tensor]:
    """Return the states (uint8) of the data generator and of torch's global generators, which dropout uses, by name."""
    states = {"data": data.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(data: torch.Generator, states: Mapping[str, Tensor]) -> None:
    """Restore the states that `random_states` returned; devices that do not exist here are skipped."""
    data.set_state(states["data"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
