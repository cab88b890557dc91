"""Asynchronous checkpoints: a thread writes a copy of the state while training goes on.

The thread also makes the copy, while gradients are computed: these change nothing that a checkpoint contains. Training
is blocked only if the next update is due before the copy is complete (Mohan et al. 2021, CheckFreq).
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
    """A checkpoint that is being written, and its result."""

    step: int
    thread: threading.Thread | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    saved: Saved | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Written:
    """The result of writing the checkpoint of a step: `saved`, or the `error`, which does not make the job fail."""

    step: int
    saved: Saved | None
    error: CheckpointWriteFailed | None


@dataclass
class Stops:
    """How long checkpoints blocked training: the seconds for each checkpoint, and the number of checkpoints that had
    to wait because the previous one was still being written."""

    seconds: list[float] = field(default_factory=list)
    waits: int = 0


class AsyncCheckpoints:
    """Writes checkpoints in a thread, one at a time, and keeps the `keep` newest. Used by the training thread.

    With a `group`, each worker writes the tensors that it holds, and the leading worker removes old checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int, group: dist.ProcessGroup | None, *, leads: bool) -> None:
        self.stops = Stops()
        self._checkpoints, self._keep, self._group, self._leads = checkpoints, keep, group, leads
        self._writing: _Writing | None = None
        # The buffers of the copy are reused: allocating them takes several times as long as filling them.
        self._memory: dict[str, Tensor] = {}

    def begin(self, progress: Progress, parts: Parts) -> None:
        """Start to write a checkpoint of `parts`, which must not change until `wait_for_copy` returns.

        No other checkpoint may be in progress.
        """
        writing = _Writing(progress.step)
        thread = threading.Thread(
            target=self._write, args=(writing, progress, parts), name=f"checkpoint {progress.step}", daemon=True
        )
        writing.thread = thread
        self._writing = writing
        self.stops.seconds.append(0.0)
        thread.start()

    def wait_for_copy(self) -> float:
        """Block until the state has been copied and may change; return the seconds waited."""
        if self._writing is None or self._writing.copied.is_set():
            return 0.0
        began = time.perf_counter()
        self._writing.copied.wait()
        waited = time.perf_counter() - began
        self.stops.seconds[-1] += waited
        return waited

    def ended(self) -> Written | None:
        """Return the result of the checkpoint being written, once; None while it is in progress, or if there is none.

        Errors of the thread other than `CheckpointWriteFailed` are raised.
        """
        return None if self.busy else self.finished()

    def finished(self, alive: Callable[[], None] = lambda: None) -> Written | None:
        """Wait for the checkpoint in progress, calling `alive` once a second, and return its result as `ended` does."""
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
        """Whether a checkpoint is being written."""
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
            # NumPy copies in one thread without the GIL; torch would compete with the training steps for all threads.
            np.copyto(_bytes(copy), _bytes(tensor))
        else:
            copy.copy_(tensor)
        return copy


def _bytes(tensor: Tensor) -> np.ndarray:
    data: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return data
