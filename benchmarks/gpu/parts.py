"""Parts of the whole, each in a process of its own and within its own time, so that none can eat that of the others."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COMPILING = 150
"""Seconds that verdicts may take, most of which programs are compiled in."""
WHOLE = Path(__file__).with_name("everything.py")


class Part(NamedTuple):
    """A function of a module here, which yields rows, and the seconds that it may take.

    Where a module's cases are shared among several processes, which compile at once, `share` is which of how many.
    """

    module: str
    function: str
    limit: int
    share: tuple[int, int] = (0, 1)

    @property
    def name(self) -> str:
        """What it is called on a command line."""
        which, several = self.share
        return f"{self.module}.{self.function}" + (f".{which + 1}" if several > 1 else "")

    def rows(self, device: str, *, small: bool) -> Iterator[dict[str, Any]]:
        """What it finds, in this process."""
        module, (which, several) = importlib.import_module(self.module), self.share
        if several > 1:
            module.RIGHT = module.RIGHT[which::several]  # type: ignore[attr-defined]
        found: Iterator[dict[str, Any]] = getattr(module, self.function)(device, small=small)
        return found


def judges(module: str, several: int = 1) -> tuple[Part, ...]:
    """The verdicts of a module, by several processes."""
    return tuple(Part(module, "verdicts", COMPILING, (which, several)) for which in range(several))


def apart(part: Part, options: Iterable[str], limit: float) -> Iterator[dict[str, Any]]:
    """The rows of a part in another process; a row that says so if it fails, or does not end within so many seconds."""
    command = [sys.executable, str(WHOLE), "--part", part.name, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        over = threading.Event()

        def stop() -> None:
            over.set()
            process.kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
    if over.is_set():
        yield {"part": part.name, "stopped": f"did not end within {limit:.0f} s"}
    elif code:
        yield {"part": part.name, "stopped": f"ended with code {code}"}
