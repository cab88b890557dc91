"""Two machines on one: each has a raylet, the second in a network namespace of its own, whose cable can be pulled."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

NODE_BYTES = 96 * 2**20
"""Memory that each machine offers: room for one replica."""
CACHE_BYTES = 64 * 2**20
CLI = [sys.executable, "-c", "from attn_cli.main import main; main()"]
READY_SECONDS = 180.0


def why_no_network() -> str | None:
    """Why there can be no second network here; None if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    made = subprocess.run(["ip", "netns", "add", "attn-probe"], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", "attn-probe"], check=False)
    return None


class Machines:
    """A cluster of two raylets and any number of gateways; `stop` ends everything."""

    def __init__(self, home: Path) -> None:
        number = os.getpid() % 200
        self.name, self._cable = f"attn-{number}", f"attn{number}a"
        self.first, self.second = f"10.213.{number}.1", f"10.213.{number}.2"
        self._folder = Path(tempfile.mkdtemp(prefix="am-", dir="/tmp"))  # Ray's sockets need short paths
        self.environment = {
            **os.environ,
            "ATTN_HOME": str(home),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Lay the cable and start a raylet at each end."""
        end = self._cable[:-1] + "b"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", end, "netns", self.name)
        run("ip", "addr", "add", f"{self.first}/24", "dev", self._cable)
        run("ip", "link", "set", self._cable, "up")
        there = ["ip", "netns", "exec", self.name]
        run(*there, "ip", "addr", "add", f"{self.second}/24", "dev", end)
        run(*there, "ip", "link", "set", end, "up")
        run(*there, "ip", "link", "set", "lo", "up")
        self._raylet("first", "--head", "--port", "6399", "--node-ip-address", self.first)
        self.environment["RAY_ADDRESS"] = f"{self.first}:6399"
        wait_for(lambda: answers(self.first, 6399), "the first raylet")
        self._raylet("second", "--address", f"{self.first}:6399", "--node-ip-address", self.second, before=there)
        for name in ("first", "second"):
            log = self._folder / f"{name}.log"
            wait_for(lambda log=log: "Ray runtime started" in log.read_text(), f"the {name} raylet")

    def cut(self) -> None:
        """Pull the cable: nothing passes, and nobody is told."""
        run("ip", "link", "set", self._cable, "down")

    def mend(self) -> None:
        """Put the cable back."""
        run("ip", "link", "set", self._cable, "up")

    def gateway(self, *arguments: str, **environment: str) -> Gateway:
        """Start a gateway on the first machine."""
        made = Gateway(self._folder, arguments, self.environment | environment)
        self._processes.append(made.process)
        return made

    def stop(self) -> None:
        """End all processes and remove the network."""
        for process in reversed(self._processes):
            for one in family(process.pid):
                one.kill()
            process.wait()
        subprocess.run(["ip", "netns", "del", self.name], check=False)
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _raylet(self, name: str, *arguments: str, before: Sequence[str] = ()) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [*before, ray, "start", *arguments, "--num-cpus", "2", "--memory", str(NODE_BYTES), "--block"]
        command += ["--object-store-memory", str(80 * 2**20), "--disable-usage-stats"]
        if "--head" in arguments:
            command += ["--temp-dir", str(self._folder / "ray"), "--include-dashboard", "false"]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )


class Gateway:
    """A process of `attn serve`."""

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._ready = folder / f"ready-{secrets.token_hex(4)}.json"
        self._log = self._ready.with_suffix(".log")
        command = [*CLI, "serve", "--port", "0", "--ready-file", str(self._ready), *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> str:
        """The address, once it serves."""
        wait_for(lambda: self._ready.exists() or self.process.poll() is not None, "a gateway")
        if not self._ready.exists():
            raise AssertionError(self._log.read_text()[-2000:])
        told: dict[str, Any] = json.loads(self._ready.read_text())
        return str(told["address"])

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it; nothing if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    import socket

    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_for(condition: Any, what: str, seconds: float = READY_SECONDS) -> None:
    """Return once something is so; raises `TimeoutError` naming it."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.1)
