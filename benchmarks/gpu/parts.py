"""Parts of the benchmark, each in a process of its own with its own time limit, so that none delays the others."""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

WHOLE = Path(__file__).with_name("everything.py")


class Part(NamedTuple):
    """A function of a module in this folder that yields rows, and its time limit in seconds."""

    module: str
    function: str
    limit: float

    @property
    def name(self) -> str:
        """The name of the part on the command line, MODULE.FUNCTION."""
        return f"{self.module}.{self.function}"

    def rows(self, device: str, *, small: bool) -> Iterator[dict[str, Any]]:
        """Run the part in this process and yield its rows."""
        found: Iterator[dict[str, Any]] = getattr(importlib.import_module(self.module), self.function)
        return found(device, small=small)  # type: ignore[operator,no-any-return]


def apart(part: Part, options: Iterable[str], limit: float) -> Iterator[dict[str, Any]]:
    """Run a part in another process; yields its rows, one for a failure or time-out, and one with the time taken."""
    command = [sys.executable, str(WHOLE), "--part", part.name, *options]
    began = time.monotonic()
    # A session of its own, so that the compilers it starts are killed with it and do not keep its output open.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        over = threading.Event()

        def stop() -> None:
            over.set()
            end(process)

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                if (row := row_of(line)) is not None:
                    yield {"part": part.name, **row}
            code = process.wait()
        finally:
            timer.cancel()
            end(process)
    if over.is_set():
        yield {"part": part.name, "stopped": f"did not end within {limit:.0f} s"}
    elif code:
        yield {"part": part.name, "stopped": f"ended with code {code}", "failed": True}
    yield {"part": part.name, "seconds": round(time.monotonic() - began, 1)}


def at_once(verdicts: list[Part], compiled: list[Part], options: list[str], slack: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the verdicts as they arrive, while the parts `compiled` compile their programs concurrently."""
    found = queue.SimpleQueue[dict[str, Any]]()

    def judge(part: Part) -> None:
        for row in apart(part, options, slack * part.limit):
            found.put(row)

    def prepare(part: Part) -> None:
        for row in apart(part, [*options, "--once"], part.limit):
            if "stopped" in row or "seconds" in row:
                found.put({**row, "part": f"compiling for {row['part']}"})

    with ThreadPoolExecutor(len(verdicts) + len(compiled) if slack == 1 else 1) as pool:
        given = [*((judge, part) for part in verdicts), *((prepare, part) for part in compiled)]
        for work, part in given:
            pool.submit(work, part).add_done_callback(lambda done: found.put(ended(done)))
        left = len(given)
        while left:
            row = found.get()
            if "ended" not in row:
                yield row
                continue
            left -= 1
            if row["ended"]:
                yield {"part": "everything", "stopped": row["ended"]}


def ended(work: Future[None]) -> dict[str, Any]:
    """The marker after the last row of a part, with the reason if the part could not be started."""
    error = work.exception()
    return {"ended": "" if error is None else f"{type(error).__name__}: {error}"}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def row_of(line: str) -> dict[str, Any] | None:
    """The row in a line of output; None for any other output."""
    if not line.startswith("{"):
        return None
    with suppress(json.JSONDecodeError):
        found: dict[str, Any] = json.loads(line)
        return found
    return None
