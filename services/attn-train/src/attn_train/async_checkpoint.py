"""Checkpoints that are written beside the next steps, by a thread, from a copy of the state.

The copy is made by the thread too, while gradients are computed, which change nothing that a checkpoint holds: training
stops only where an update would come before the copy has ended (Mohan et al. 2021, CheckFreq).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from attn_core.errors import CheckpointWriteFailed
from torch import Tensor

from attn_train.checkpoint import Checkpoints, Progress, Saved
from attn_train.sharded_checkpoint import Block, Held, Parts, Pieces


@dataclass
class _Writing:
    """A checkpoint on its way, and what became of it."""

    step: int
    thread: threading.Thread | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    saved: Saved | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Written:
    """What became of the checkpoint of a step: it is `saved`, or there is the `error`, which is none of the job's."""

    step: int
    saved: Saved | None
    error: CheckpointWriteFailed | None


@dataclass
class Stops:
    """For how long training stood still for checkpoints: seconds for each of them, and how many had to wait because
    the one before was still being written."""

    seconds: list[float] = field(default_factory=list)
    waits: int = 0


class AsyncCheckpoints:
    """Writes checkpoints in a thread, one at a time, and keeps the `keep` newest; for the thread that trains.

    Of several workers, the `group`, each writes what it holds, and the first removes old ones.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int, group: dist.ProcessGroup | None, *, leads: bool) -> None:
        self.stops = Stops()
        self._checkpoints, self._keep, self._group, self._leads = checkpoints, keep, group, leads
        self._writing: _Writing | None = None
        # The memory of the copy is kept for the next one: getting it takes several times as long as filling it.
        self._memory: dict[str, Tensor] = {}

    def begin(self, progress: Progress, parts: Parts) -> None:
        """Write a checkpoint of tensors that stay as they are until `wait_for_copy` returns; none is being written."""
        writing = _Writing(progress.step)
        thread = threading.Thread(
            target=self._write, args=(writing, progress, parts), name=f"checkpoint {progress.step}", daemon=True
        )
        writing.thread = thread
        self._writing = writing
        self.stops.seconds.append(0.0)
        thread.start()

    def wait_for_copy(self) -> float:
        """Return once the state may change, after so many seconds."""
        if self._writing is None or self._writing.copied.is_set():
            return 0.0
        began = time.perf_counter()
        self._writing.copied.wait()
        waited = time.perf_counter() - began
        self.stops.seconds[-1] += waited
        return waited

    def ended(self) -> Written | None:
        """What became of the checkpoint that was being written, once; None while it still is, and where there is none.

        Raises what else went wrong in the thread.
        """
        return None if self.busy else self.finished()

    def finished(self, alive: Callable[[], None] = lambda: None) -> Written | None:
        """As `ended`, after waiting for it; `alive` is called every now and then meanwhile."""
        writing, self._writing = self._writing, None
        if writing is None or writing.thread is None:
            return None
        while writing.thread.is_alive():
            alive()
            writing.thread.join(1.0)
        if writing.error is not None and not isinstance(writing.error, CheckpointWriteFailed):
            raise writing.error
        return Written(writing.step, writing.saved, writing.error)

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None and self._writing.thread is not None and self._writing.thread.is_alive()

    def _write(self, writing: _Writing, progress: Progress, parts: Parts) -> None:
        try:
            copies = {
                part: {name: self._copy(part, name, held) for name, held in own.items()} for part, own in parts.items()
            }
            del parts
            writing.copied.set()
            writing.saved = self._checkpoints.write(progress, copies, self._group)
            if self._leads:
                self._checkpoints.prune(self._keep)
        except BaseException as error:  # noqa: BLE001 -- it is raised in the thread that trains
            writing.error = error
        finally:
            writing.copied.set()

    def _copy(self, part: str, name: str, held: Held) -> Held:
        if isinstance(held, Pieces):
            blocks = (
                Block(block.offsets, self._copied(f"{part}/{name}/{place}", block.tensor))
                for place, block in enumerate(held.blocks)
            )
            return Pieces(held.shape, tuple(blocks))
        return self._copied(f"{part}/{name}", held)

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        copy = self._memory.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_contiguous() and not tensor.is_cuda:
            # By one thread, which does not hold Python's lock; torch would take as many as the steps beside it.
            np.copyto(_bytes(copy), _bytes(tensor))
        else:
            copy.copy_(tensor)
        return copy


def _bytes(tensor: Tensor) -> np.ndarray:
    data: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return data
