"""The server of the demo: `attn serve` as a user would start it, and a check that it has ended afterwards."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from shell import ATTN, DemoError

READY_SECONDS = 120
STOP_SECONDS = 60


@contextmanager
def serving(home: Path, *models: str, options: Sequence[str] = ()) -> Iterator[str]:
    """Start a server with these models and yield its address; at the end, stop it and check that nothing is left."""
    with tempfile.TemporaryDirectory(prefix="attn-demo-") as folder:
        ready = Path(folder) / "ready.json"
        log = Path(folder) / "server.log"
        words = [
            "serve",
            "--port",
            "0",
            "--home",
            str(home),
            *(word for model in models for word in ("--model", model)),
            *options,
        ]
        print(f"$ {shlex.join(['attn', *words])} &", flush=True)
        command = [ATTN, *words, "--ready-file", ready]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
        family: list[psutil.Process] = []
        address = ""
        try:
            address = _wait_until_ready(process, ready, log)
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            print(f"  serving on {address}, in {len(family)} processes", flush=True)
            yield address
        finally:
            _stop(process)
            _check_nothing_is_left(family, address)
        print(f"  the server is gone, with its {len(family)} processes and its port", flush=True)


def _wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    end = time.monotonic() + READY_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise DemoError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)
    return str(json.loads(ready.read_text())["address"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise DemoError(f"the server did not stop within {STOP_SECONDS} s") from None


def _check_nothing_is_left(family: list[psutil.Process], address: str) -> None:
    _, alive = psutil.wait_procs(family, timeout=5)
    if alive:
        raise DemoError(f"processes are left: {alive}")
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        if port and probe.connect_ex((host, int(port))) == 0:
            raise DemoError(f"port {port} is still open")
