"""Child processes of this Python, which exchange messages with it over pipes and end when it does.

A message is a value in MessagePack after its length. The parent uses `Child`, the function that runs in the child
`Parent`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TypeVar

import msgspec
from attn_core.errors import starting

LENGTH_BYTES = 4
Kind = TypeVar("Kind")


class Child:
    """A Python process that calls the function `target`, "module:function", with changes to its `environment`.

    It has a session of its own: signals from the terminal reach only this process, which then stops its children. Its
    standard error is passed on to that of this process. Methods may be called from any thread. Raises `Unavailable` if
    the process cannot be started.
    """

    def __init__(self, target: str, environment: Mapping[str, str]) -> None:
        module, _, function = target.partition(":")
        with starting(module):
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import {function}; {function}()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._sending = threading.Lock()
        self.pid = self._process.pid
        self._last_line = ""
        self._reader = threading.Thread(target=self._pass_on, name=f"log of {self.pid}", daemon=True)
        self._reader.start()

    def send(self, message: object) -> None:
        """Send a message; one to a child that has ended is dropped."""
        with self._sending, contextlib.suppress(BrokenPipeError, ValueError):
            if self._process.stdin is not None:
                _write(self._process.stdin, message)

    def messages(self, kind: type[Kind]) -> Iterator[Kind]:
        """Yield the messages of the child until it ends; only one thread may iterate."""
        if self._process.stdout is not None:
            with self._process.stdout as pipe:
                yield from _read(pipe, kind)

    def kill(self) -> None:
        """Kill the process; returns at once."""
        self._process.kill()

    def ended(self, timeout: float) -> str | None:
        """Return how the process has ended; None if it has not within `timeout` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def stop(self, timeout: float) -> str:
        """End the process, which exits when its standard input is closed, or is killed `timeout` seconds later.

        Returns how it has ended, and the last line that it wrote to its standard error, if any.
        """
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        words = self.ended(timeout)
        while words is None:
            self.kill()
            words = self.ended(1.0)
        self._reader.join(1.0)  # its own children may hold the pipe open
        return f"{words}: {self._last_line}" if self._last_line else words

    def _pass_on(self) -> None:
        if self._process.stderr is not None:
            with self._process.stderr as pipe:
                for line in pipe:
                    self._last_line = line.decode(errors="replace").strip() or self._last_line
                    with contextlib.suppress(OSError):
                        os.write(2, line)


class Parent:
    """In a child: the connection to its parent. What this process prints goes to its standard error from now on."""

    def __init__(self) -> None:
        self._messages = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        # Not `sys.stdin`, whose lock would be held by the reading thread when the interpreter ends.
        self._own = os.fdopen(os.dup(0), "rb")

    def task(self, kind: type[Kind]) -> Kind:
        """Return the first message of the parent; the process exits if there is none."""
        for task in _read(self._own, kind):
            return task
        raise SystemExit

    def follow(self, kind: type[Kind], received: Callable[[Kind], None]) -> None:
        """From now on, call `received` with each message, in a thread; this process exits when its parent ends."""

        def run() -> None:
            for message in _read(self._own, kind):
                received(message)
            os._exit(1)

        threading.Thread(target=run, name="attn-parent", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message."""
        _write(self._messages, message)


def _write(pipe: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message, enc_hook=str)
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes], kind: type[Kind]) -> Iterator[Kind]:
    """Yield the messages from a pipe until it is closed; a message that was cut off is dropped."""
    while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
        data = pipe.read(size := int.from_bytes(head, "little"))
        if len(data) == size:
            yield msgspec.msgpack.decode(data, type=kind)
