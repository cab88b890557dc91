"""Checkpoints of a run: folders of safetensors and JSON, written atomically."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from attn_core.errors import CheckpointInvalid
from attn_models.weights import read_manifest, staged_folder, verify_manifest
from torch import Tensor

from attn_train.sharded_checkpoint import Parts, read_whole, write_sharded

NAME = re.compile(r"step-(\d{9})")
PROGRESS_NAME = "progress.json"
WEIGHTS_NAME = "weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is: updates done, and seconds spent on them."""

    step: int
    elapsed_seconds: float


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir())


class WholeCheckpoint(NamedTuple):
    """A checkpoint that was read and is what was written: where it is, and what it holds."""

    saved: SavedCheckpoint
    progress: Progress
    parts: Parts


class CheckpointFolder:
    """The checkpoints of one run, below one folder. Only one process may write there at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[SavedCheckpoint]:
        """All complete checkpoints, oldest first."""
        names = sorted(self.path.iterdir()) if self.path.is_dir() else []
        matches = ((path, NAME.fullmatch(path.name)) for path in names)
        return [SavedCheckpoint(path=path, step=int(match[1])) for path, match in matches if match]

    def of_step(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.path / f"step-{step:09d}"

    def newest(self) -> SavedCheckpoint | None:
        """The complete checkpoint of the highest step."""
        return next(reversed(self.complete()), None)

    def newest_whole(self, damaged: Callable[[SavedCheckpoint, CheckpointInvalid], None]) -> WholeCheckpoint | None:
        """The checkpoint of the highest step of those that are what was written; None where there is none.

        Newer ones that are not are told to `damaged` and set aside: they are no checkpoints any more.
        """
        for found in reversed(self.complete()):
            try:
                progress, parts = read_checkpoint(found.path)
            except CheckpointInvalid as error:
                found.path.rename(self.path / f".damaged-{found.path.name}")
                damaged(found, error)
            else:
                return WholeCheckpoint(found, progress, parts)
        return None

    def write(self, progress: Progress, parts: Parts) -> SavedCheckpoint:
        """Write a checkpoint; it is there, flushed and with the hashes of its files, when this returns.

        Raises CheckpointWriteFailed, with the older checkpoints untouched and nothing half-written left.
        """
        from safetensors.torch import save_file

        target = self.of_step(progress.step)
        with staged_folder(target) as stage:
            for name, tensors in parts.items():
                ready = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
                save_file(ready, stage / f"{name}.safetensors")
            (stage / PROGRESS_NAME).write_text(_progress_text(progress, sharded=False), encoding="utf-8")
        return SavedCheckpoint(path=target, step=progress.step)

    def write_together(
        self, progress: Progress, parts: Parts, group: dist.ProcessGroup | None = None
    ) -> SavedCheckpoint:
        """As `write`, by all workers of a group, each its own shards of every `DTensor`; called by each of them.

        Any number of workers reads it, with `read_sharded` into tensors of their own layout, or `read_checkpoint`.
        """
        target = self.path / f"step-{progress.step:09d}"
        write_sharded(target, parts, {PROGRESS_NAME: _progress_text(progress, sharded=True)}, group)
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


def _progress_text(progress: Progress, *, sharded: bool) -> str:
    facts = {"format": 1, "step": progress.step, "elapsed_seconds": progress.elapsed_seconds}
    return json.dumps(facts | ({"sharded": True} if sharded else {})) + "\n"


def read_checkpoint(path: Path) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """The progress and the parts of a checkpoint, on the CPU.

    Raises CheckpointInvalid if a file is missing, or is not what was written.
    """
    from safetensors.torch import load_file

    records = read_manifest(path)
    if records is None:
        raise CheckpointInvalid.of(path, "has no manifest")
    if PROGRESS_NAME not in records:
        raise CheckpointInvalid.of(path, f"has no {PROGRESS_NAME} in its manifest")
    verify_manifest(path, records)
    # The hashes agree, so the content is what this module wrote.
    facts = json.loads((path / PROGRESS_NAME).read_text(encoding="utf-8"))
    progress = Progress(step=facts["step"], elapsed_seconds=facts["elapsed_seconds"])
    if facts.get("sharded"):
        return progress, read_whole(path)
    if WEIGHTS_NAME not in records:
        raise CheckpointInvalid.of(path, f"has no {WEIGHTS_NAME} in its manifest")
    parts = {Path(name).stem: load_file(path / name) for name in records if name.endswith(".safetensors")}
    return progress, parts


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
