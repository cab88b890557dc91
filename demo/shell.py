"""Running `attn` commands as a person would type them, in sight of whoever watches."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ATTN = Path(sys.executable).with_name("attn")
CHUNK = 4096


class DemoError(Exception):
    """A step did not do what it should."""


def heading(number: int, text: str) -> None:
    """Announce a step."""
    print(f"\n== {number}. {text}", flush=True)


def run(*words: str) -> None:
    """Run `attn` with these words on this terminal; its progress bars appear as they are."""
    _show("attn", *words)
    code = subprocess.run([ATTN, *words], check=False, stdin=subprocess.DEVNULL).returncode
    _require_success(code, words)


def run_and_read(*words: str) -> str:
    """Run `attn`, pass on its output as it streams in, and return it."""
    _show("attn", *words)
    output = bytearray()
    with subprocess.Popen([ATTN, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        if process.stdout is None:
            raise DemoError("no output to read")
        while chunk := process.stdout.raw.read(CHUNK):  # type: ignore[attr-defined]
            output += chunk
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        code = process.wait()
    _require_success(code, words)
    return output.decode(errors="replace")


def pip_install(folder: Path) -> None:
    """Install a plugin from its folder, as a wheel, with nothing but itself."""
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
