"""However a server process ends, it leaves no process, no port and no file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from attn_gateway.ray_folder import RayFolder, remove_abandoned

SCRIPT = Path(__file__).with_name("ray_server.py")
MARK = "ATTN_TEST_MARK"


class Server:
    """A process of its own, found again by a mark in the environment of all it starts."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.ready_file = folder / "ready.json"
        # Ray puts sockets below it, whose paths must stay short.
        self.temporary = Path(tempfile.mkdtemp(prefix="a-", dir="/tmp"))
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "ATTN_HOME": str(folder / "home")}
        environment["ATTN_PLUGINS"] = "attn-cli,attn-gateway"
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen([*command, str(self.ready_file)], env=environment, stderr=subprocess.PIPE)

    def wait_ready(self) -> dict[str, Any]:
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.process.stderr.read().decode()
            time.sleep(0.05)
        return json.loads(self.ready_file.read_text())

    def family(self) -> list[str]:
        return [process.name() for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def leftovers(self) -> list[str]:
        return [*self.family(), *(path.name for path in self.temporary.iterdir())]

    def kill(self) -> None:
        for process in psutil.process_iter():
            if self._is_ours(process):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.temporary)


@pytest.fixture
def on_ray(tmp_path: Path) -> Iterator[Server]:
    server = Server([sys.executable, str(SCRIPT)], tmp_path)
    yield server
    server.kill()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Server]:
    code = "from attn_cli.main import main; main()"
    server = Server([sys.executable, "-c", code, "serve", "--port", "0", "--ready-file"], tmp_path)
    yield server
    server.kill()


ABANDON = """
import os, signal
from attn_gateway.ray_folder import RayFolder
print(RayFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_server_is_removed_by_the_next_one_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, check=False)
    assert Path(killed.stdout.decode().strip()).is_dir()
    in_use = RayFolder()
    being_made = Path(tempfile.mkdtemp(prefix="attn-ray-"))
    remove_abandoned()
    assert set(tmp_path.iterdir()) == {in_use.path, being_made}
    in_use.remove()
    assert set(tmp_path.iterdir()) == {being_made}


def test_the_command_says_where_it_is_and_cleans_up(command: Server) -> None:
    facts = command.wait_ready()
    assert facts["pid"] == command.process.pid
    assert facts["tls"] is False
    assert "attn.v1.CatalogService" in facts["services"]
    host, _, port = facts["address"].rpartition(":")
    socket.create_connection((host, int(port)), timeout=60).close()
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(timeout=60) == 0
    assert not command.ready_file.exists()
    assert command.leftovers() == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


@pytest.mark.ray
@pytest.mark.slow
def test_a_signal_while_serving_ends_ray_and_all(on_ray: Server) -> None:
    on_ray.wait_ready()
    assert len(on_ray.family()) > 3
    on_ray.process.send_signal(signal.SIGTERM)
    assert on_ray.process.wait(timeout=60) == 0
    assert on_ray.leftovers() == []
    assert not on_ray.ready_file.exists()


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("moment", [1.0, 2.5])
def test_a_signal_while_starting_ends_ray_and_all(on_ray: Server, moment: float) -> None:
    time.sleep(moment)
    on_ray.process.send_signal(signal.SIGINT)
    code = on_ray.process.wait(timeout=60)
    assert code in (130, -signal.SIGINT, 1)
    assert on_ray.leftovers() == []
    assert not on_ray.ready_file.exists()


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
def test_a_second_signal_does_not_wait(on_ray: Server) -> None:
    on_ray.wait_ready()
    on_ray.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    on_ray.process.send_signal(signal.SIGINT)
    assert on_ray.process.wait(timeout=60) == 130
    assert on_ray.leftovers() == []
    assert not on_ray.ready_file.exists()


def test_at_sighup_the_config_file_is_read_again_and_one_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("server: {shutdown_timeout: 1}\nmodels: {}\n")
    code = "from attn_cli.main import main; main()"
    words = ["serve", "--port", "0", "--config", str(config), "--ready-file"]
    server = Server([sys.executable, "-c", code, *words], tmp_path)
    lines = []
    try:
        server.wait_ready()
        for text in ("modells: {}\n", "models: {a: {deployment: {replicas: 0}}}\n", "models: {}\n"):
            config.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            lines.append(next(line for line in server.process.stderr if b"config" in line).decode())
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        _, said = server.process.communicate(timeout=60)
        assert b"config" not in said
    finally:
        server.kill()
    assert "not applied" in lines[0]
    assert "modells" in lines[0]
    assert "not applied" in lines[1]
    assert "replicas" in lines[1]
    assert "applied" in lines[2]
    assert "not" not in lines[2]
