"""Runs the other ranks of a model as processes on this machine; `main` is the entry point of such a process."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from attn_models.device import resolve_device
from attn_schema import EngineConfig

from attn_engine.host.ranks import RankGroup, RankTask, run_rank

log = logging.getLogger(__name__)


class RankProcesses:
    """Starts ranks as local processes. Implements `RankLauncher`.

    A process ends by itself when its parent has ended, as its connection to the parent is closed.
    """

    ip = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, tasks: Sequence[RankTask]) -> None:
        """See `RankLauncher.start`."""
        for task in tasks:
            command = [sys.executable, "-c", "from attn_engine.host.rank_processes import main; main()"]
            # In a session of its own: signals from the terminal reach only this process, which then stops the ranks.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            self._processes[task.index] = process
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(msgspec.json.encode(task))
                    process.stdin.close()

    def pids(self) -> list[int]:
        """The process ids, for monitoring."""
        return [process.pid for process in self._processes.values()]

    def ended(self) -> str | None:
        """See `RankLauncher.ended`."""
        for index, process in self._processes.items():
            code = process.poll()
            if code is not None:
                return f"the process of rank {index} exited with code {code}"
        return None

    def stop(self, timeout: float) -> None:
        """See `RankLauncher.stop`."""
        until = time.monotonic() + timeout
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def local_ranks(folder: Path, config: EngineConfig) -> RankGroup:
    """The other ranks as processes on this machine, each on the GPU with the rank's index if there are GPUs."""

    def lost(error: Exception) -> None:
        log.error("%s", error)

    return RankGroup(folder, config, RankProcesses(), lost)


def main() -> None:
    """Run the rank whose `RankTask` is read as JSON from the standard input."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=RankTask)
    if resolve_device(task.config.device).type == "cuda":
        task = msgspec.structs.replace(task, config=task.config.replace(device=f"cuda:{task.index}"))
    run_rank(task)
