"""Checkpoints of a run: folders of safetensors and JSON, written atomically by one worker or by several together."""

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

from attn_train.agreement import leads, require_agreed, texts_of_all
from attn_train.sharded_checkpoint import Parts, read_whole, write_shards

NAME = re.compile(r"step-(\d{9})")
PROGRESS_NAME = "progress.json"
WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is: updates done, and seconds spent on them."""

    step: int
    elapsed_seconds: float


class Saved(Protocol):
    """A complete checkpoint: its step, its path or URL, the bytes of all its files, and when it was written."""

    @property
    def step(self) -> int: ...  # noqa: D102
    @property
    def where(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def written(self) -> datetime: ...  # noqa: D102


class Checkpoints(Protocol):
    """The checkpoints of one run, wherever they are kept. Only the workers of one attempt may write at a time."""

    def newest(self) -> Saved | None:
        """The complete checkpoint of the highest step."""
        ...

    def newest_whole(self, damaged: Callable[[Saved, CheckpointInvalid], None]) -> Saved | None:
        """The checkpoint of the highest step of those that are what was written; None where there is none.

        Newer ones that are not are told to `damaged` and are no checkpoints any more.
        """
        ...

    def opened(self, step: int) -> AbstractContextManager[Path]:
        """A context with a folder that holds the files of the checkpoint of a step, on every worker."""
        ...

    def write(self, progress: Progress, parts: Parts, group: dist.ProcessGroup | None = None) -> Saved:
        """Write a checkpoint, each worker of `group` what it holds; it is there, flushed, when this returns.

        Called by each of them; None: this one is alone. Any other layout of workers reads it. Raises
        `CheckpointWriteFailed` in all of them, with the older checkpoints untouched and nothing half-written left.
        """
        ...

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints."""
        ...

    def sweep(self) -> None:
        """Remove what writers that were killed left behind; only for the one process that may write."""
        ...

    def remove(self) -> None:
        """Remove all that there is of the run; nobody writes any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def where(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def written(self) -> datetime:
        """When it was written."""
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)


class CheckpointFolder:
    """The checkpoints of one run, below one folder that all its workers see at the same path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[SavedCheckpoint]:
        """All complete checkpoints, oldest first."""
        names = sorted(self.path.iterdir()) if self.path.is_dir() else []
        matches = ((path, NAME.fullmatch(path.name)) for path in names)
        return [SavedCheckpoint(path=path, step=int(match[1])) for path, match in matches if match]

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.path / step_name(step)

    @contextmanager
    def opened(self, step: int) -> Iterator[Path]:
        """See `Checkpoints.opened`."""
        yield self.of_step(step)

    def newest(self) -> SavedCheckpoint | None:
        """The complete checkpoint of the highest step."""
        return next(reversed(self.complete()), None)

    def newest_whole(self, damaged: Callable[[SavedCheckpoint, CheckpointInvalid], None]) -> SavedCheckpoint | None:
        """See `Checkpoints.newest_whole`; damaged ones are set aside."""
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
                stage = texts_of_all("", group)[0]
                if not stage:
                    raise OSError("the first worker could not make the folder")
                write_shards(Path(stage), parts, group)
        except AttnError as error:
            failure = error
        except OSError as error:
            failure = CheckpointWriteFailed.of(target, error)
        require_agreed(failure, target, group)
        return SavedCheckpoint(path=target, step=progress.step)

    def prune(self, keep: int) -> None:
        """Remove all but the `keep` newest checkpoints."""
        for checkpoint in self.complete()[:-keep]:
            # The new name makes it incomplete in one step, whatever becomes of the removal.
            doomed = checkpoint.path.rename(self.path / f".removed-{checkpoint.path.name}")
            shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what writers that were killed left behind; only for the one process that may write."""
        for path in self.path.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """See `Checkpoints.remove`."""
        shutil.rmtree(self.path, ignore_errors=True)


def _write_first(target: Path, progress: Progress, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """The first worker's part: the folder, its own files, and the seal once all have written theirs."""
    told = False
    try:
        with staged_folder(target) as stage:
            texts_of_all(str(stage), group)
            told = True
            write_shards(stage, parts, group)
            write_progress(stage, progress)
    finally:
        if not told:
            texts_of_all("", group)


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:09d}"


def write_progress(folder: Path, progress: Progress) -> None:
    """Beside the tensors."""
    facts = {"format": 2, "step": progress.step, "elapsed_seconds": progress.elapsed_seconds}
    (folder / PROGRESS_NAME).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """Of a folder that is what was written."""
    facts = json.loads((folder / PROGRESS_NAME).read_text(encoding="utf-8"))
    return Progress(step=facts["step"], elapsed_seconds=facts["elapsed_seconds"])


def require_whole(path: Path) -> None:
    """Raise `CheckpointInvalid` if a file of a checkpoint is missing, or is not what was written."""
    records = read_manifest(path)
    if records is None:
        raise CheckpointInvalid.of(path, "has no manifest")
    require_parts(path, records)
    verify_manifest(path, records)


def require_parts(path: object, names: Mapping[str, object]) -> None:
    """Raise `CheckpointInvalid` where the files of a checkpoint by name lack what every one has."""
    if PROGRESS_NAME not in names:
        raise CheckpointInvalid.of(path, f"has no {PROGRESS_NAME} in its manifest")
    if not any(name.startswith(WEIGHTS) for name in names):
        raise CheckpointInvalid.of(path, f"has no {WEIGHTS} in its manifest")


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """The progress and the whole tensors of all parts of a checkpoint, on the CPU.

    Raises CheckpointInvalid if a file is missing, or is not what was written.
    """
    require_whole(path)
    return read_progress(path), read_whole(path)


def random_states(data: torch.Generator) -> dict[str, Tensor]:
    """The states, uint8 each, of the generator of batches and of those that dropout draws from, by name."""
    states = {"data": data.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(data: torch.Generator, states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` gave; a device that is no longer there is left out."""
    data.set_state(states["data"])
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
