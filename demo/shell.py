"""Runs `attn` commands as a user would type them, and prints them."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ATTN = Path(sys.executable).with_name("attn")
CHUNK = 4096
END_SECONDS = 15


class DemoError(Exception):
    """A step of the demo failed."""


def heading(number: int, text: str) -> None:
    """Print the heading of a step."""
    print(f"\n== {number}. {text}", flush=True)


def run(*words: str) -> None:
    """Run `attn` with these arguments on this terminal, with its progress bars."""
    _show("attn", *words)
    with _child(words, None) as process:
        code = process.wait()
    _require_success(code, words)


def run_and_read(*words: str) -> str:
    """Run `attn`, print its output as it arrives, and return it."""
    _show("attn", *words)
    output = bytearray()
    with _child(words, subprocess.PIPE) as process:
        while chunk := process.stdout.read(CHUNK):  # type: ignore[union-attr]
            output += chunk
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        code = process.wait()
    _require_success(code, words)
    return output.decode(errors="replace")


@contextmanager
def _child(words: tuple[str, ...], stdout: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run an `attn` process that is interrupted together with this one and has ended when the context is left."""
    process = subprocess.Popen([ATTN, *words], stdout=stdout, stdin=subprocess.DEVNULL, bufsize=0)
    try:
        yield process
    except BaseException:
        process.send_signal(signal.SIGINT)
        raise
    finally:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pip_install(folder: Path) -> None:
    """Install a plugin from its folder, as a wheel, without its dependencies."""
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", str(folder))
    _show("pip", *words)
    if subprocess.run([sys.executable, "-m", "pip", *words], check=False).returncode:
        raise DemoError(f"{folder} could not be installed")


def _show(*words: str) -> None:
    print(f"$ {shlex.join(words)}", flush=True)


def _require_success(code: int, words: tuple[str, ...]) -> None:
    if code in (130, -2):
        raise KeyboardInterrupt
    if code:
        raise DemoError(f"attn {shlex.join(words)} ended with exit code {code}")
