"""Child processes of this Python: each gets a task, may answer once, and ends when this process does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import IO, TypeVar

import msgspec
from attn_core.errors import WrongState

KEPT_LINES = 20
"""The last lines of a child's standard error that are kept."""
Task = TypeVar("Task")
_answers: list[IO[bytes]] = []
"""In a child: where its answer is written to."""


class Child:
    """A Python process that calls the function `target`, "module:function", which gets its task from `read_task`.

    It has a session of its own: signals from the terminal reach only this process, which then stops its children. Its
    standard error is passed on.
    """

    def __init__(self, target: str, task: object, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = target.partition(":")
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import {function}; {function}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.answer: Future[bytes] = Future()
        """What the child answers by `answer`; empty if it ends before."""
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._readers = [
            threading.Thread(target=work, name=f"child {self.pid}", daemon=True)
            for work in (self._read_answer, self._pass_on)
        ]
        for reader in self._readers:
            reader.start()
        # A child that has ended already is seen by its `answer` or by `ended`.
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(msgspec.json.encode(task) + b"\n")
                self._process.stdin.flush()

    def ended(self) -> str | None:
        """How the process has ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def last_words(self) -> str:
        """How the process has ended, and the last line that it wrote to its standard error, if any."""
        for reader in self._readers:
            reader.join(1.0)  # its own children may hold the file open
        lines = [line for line in self._last_lines if line.strip()]
        return ": ".join([self.ended() or "still running", *lines[-1:]])

    def close(self) -> None:
        """Tell the process to end, by closing its standard input."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self, timeout: float) -> None:
        """Let the process end for up to `timeout` seconds, then kill it; returns when it has ended."""
        try:
            self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.close()

    def _read_answer(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout as stdout:
                self.answer.set_result(stdout.readline())

    def _pass_on(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as stderr:
                for line in stderr:
                    self._last_lines.append(line.decode(errors="replace").rstrip())
                    with contextlib.suppress(OSError):
                        os.write(2, line)


def read_task(kind: type[Task]) -> Task:
    """In a child: the task. From now on the process exits when its parent does, and what it prints is logged."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    _answers.append(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, name="attn-parent", daemon=True).start()
    return task


def answer(value: object) -> None:
    """In a child: send an answer to the parent, as JSON; once."""
    if not _answers:
        raise WrongState("this process has no parent that waits for an answer")
    with _answers.pop() as file:
        file.write(msgspec.json.encode(value) + b"\n")


def _end_with_parent() -> None:
    # Not through `sys.stdin`, whose lock would be held when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(0)
