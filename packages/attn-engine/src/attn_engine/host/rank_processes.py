"""Runs the other ranks of a model as processes on this machine; `main` is the entry point of such a process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from attn_models.device import resolve_device
from attn_schema import EngineConfig
from attn_schema.child_process import Child, Parent

from attn_engine.host.ranks import RankGroup, RankTask, run_rank

log = logging.getLogger(__name__)


class RankProcesses:
    """Starts ranks as local processes. Implements `RankLauncher`.

    A process ends by itself when its parent has ended, as its connection to the parent is closed.
    """

    ip = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: dict[int, Child] = {}

    def start(self, tasks: Sequence[RankTask]) -> None:
        """See `RankLauncher.start`."""
        for task in tasks:
            child = self._processes[task.index] = Child("attn_engine.host.rank_processes:main", {})
            child.send(task)

    def pids(self) -> list[int]:
        """The process ids, for monitoring."""
        return [process.pid for process in self._processes.values()]

    def ended(self) -> str | None:
        """See `RankLauncher.ended`."""
        for index, process in self._processes.items():
            ended = process.ended(0)
            if ended is not None:
                return f"the process of rank {index} {ended}"
        return None

    def stop(self, timeout: float) -> None:
        """See `RankLauncher.stop`."""
        until = time.monotonic() + timeout
        for process in self._processes.values():
            process.ended(max(0.0, until - time.monotonic()))
            process.stop(0.0)


def local_ranks(folder: Path, config: EngineConfig) -> RankGroup:
    """The other ranks as processes on this machine, each on the GPU with the rank's index if there are GPUs."""

    def lost(error: Exception) -> None:
        log.error("%s", error)

    return RankGroup(folder, config, RankProcesses(), lost)


def main() -> None:
    """The entry point of a child process: run the rank of its `RankTask`."""
    parent = Parent()
    task = parent.task(RankTask)
    parent.follow(RankTask, lambda _: None)  # there is one; this process ends with its parent
    if resolve_device(task.config.device).type == "cuda":
        task = msgspec.structs.replace(task, config=task.config.replace(device=f"cuda:{task.index}"))
    run_rank(task)
