"""A job whose node is lost goes on with what is left, or waits for room; its losses stay what they would have been."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from attn_gateway.records import Database, database_url
from attn_schema.training import JobState
from attn_train.store import JobStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

COMPARED = 200
"""Steps after which sums in another order have made another training."""
STARTS = 3
"""How often a node is started: Ray gives up after 30 seconds, which a busy machine can need."""

ENVIRON = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # as Ray spells it


class Nodes:
    """A Ray cluster of nodes, each with processes of its own, as if it were a machine."""

    def __init__(self, until):
        self._until = until
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets have short names
        self._started = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._start("head", 0, "--head", f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self._folder}")

    def add(self, name, cpus):
        self._start(name, cpus, f"--address={self.address}")

    def _start(self, name, cpus, *options):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-name={name}"]
        command += [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", *options]
        for _ in range(STARTS):
            log = self._folder / f"{name}.log"
            with log.open("w") as out:
                process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRON)
            self._started[name] = process
            self._until(lambda p=process, at=log: p.poll() is not None or "--block" in at.read_text(), f"no {name}")
            if process.poll() is None:
                return
        pytest.fail(f"Ray did not start: {log.read_text()}")

    def processes(self, name):
        """A node's own and all below."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._started[name].pid)
            return [top, *top.children(recursive=True)]
        return []

    def holding(self, word):
        """The node of each process that runs an actor of a class whose name begins with `word`."""
        for name in self._started:
            for process in self.processes(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if f"ray::{word}" in " ".join(process.cmdline()):
                        yield name

    def kill(self, name):
        """All of its processes at once."""
        found = self.processes(name)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._started.pop(name).wait()
        psutil.wait_procs(found, timeout=60)

    def stop(self):
        for name in list(self._started):
            self.kill(name)
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def nodes(until, monkeypatch):
    # What the servers find, too: Ray's own file of a token may be of another cluster.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    found = Nodes(until)
    yield found
    found.stop()


@pytest.fixture
def server(tmp_path, nodes, server_command):
    """Starts a server on a node."""
    started = []

    def start(node):
        started.append(subprocess.Popen(server_command(tmp_path, nodes.address, node)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def store(tmp_path):
    with Database(database_url(tmp_path)) as database:
        yield JobStore(database)


@pytest.fixture
def job(store, follow):
    return follow(store)


@pytest.fixture
def asked(unending):
    return unending(20, max_failures=20)


def lines_of(store, job_id):
    found, after = [], 0
    while events := store.events(job_id, after, 1000):
        after = events[-1].id
        found += [event.log.text for event in events if event.log is not None]
    return found


def test_a_job_waits_with_the_reason_for_a_lost_node_and_goes_on_to_the_bit(nodes, server, store, job, asked):
    nodes.add("one", 1)
    nodes.add("two", 1)
    store.submit("struck", asked)
    server("head")
    job.steps_on("struck")
    assert sorted(nodes.holding("RayRankActor")) == ["one", "two"]
    nodes.kill("two")

    def waits():
        found = store.get("struck")
        assert not found.state.final, found
        return found.state is JobState.STALLED and "no room for 2 workers" in found.error.message

    job.until(waits, "the job does not say what it waits for")
    nodes.add("two again", 1)
    job.steps_on("struck")
    assert sorted(nodes.holding("RayRankActor")) == ["one", "two again"]
    job.end("struck")
    job.require_same_bits("struck", asked)
    job.until(lambda: not list(nodes.holding("Ray")), "workers or supervisors stay")


def test_an_elastic_job_goes_on_with_what_is_left_of_it(nodes, server, store, job, asked):
    nodes.add("one", 1)
    nodes.add("two", 1)
    store.submit("struck", asked.replace(min_workers=1))
    server("head")
    job.steps_on("struck")
    nodes.kill("one")
    job.steps_on("struck")
    assert list(nodes.holding("RayWorkerActor")) + list(nodes.holding("RayRankActor")) == ["two"]
    assert "there is room for 1 of 2 workers; training continues with them" in lines_of(store, "struck")
    nodes.add("one again", 1)
    job.until(lambda: len(list(nodes.holding("RayRankActor"))) == 2, "it does not take the node that is back")
    job.steps_on("struck")
    last = job.end("struck")
    found, wanted = job.losses("struck"), job.undisturbed(asked, COMPARED)
    assert sorted(found) == list(range(1, last + 1))
    for step in range(1, COMPARED + 1):
        # Sums in another order differ.
        assert all(loss == pytest.approx(min(wanted[step]), abs=1e-5) for loss in found[step]), step


def test_a_job_whose_supervisor_and_server_are_lost_with_their_node_goes_on_at_another_server(
    nodes, server, store, job, asked
):
    nodes.add("one", 2)
    nodes.add("two", 2)
    store.submit("struck", asked)
    first = server("one")
    job.steps_on("struck")
    assert list(nodes.holding("RaySupervisorActor")) == ["one"]
    first.kill()
    nodes.kill("one")
    server("two")
    job.steps_on("struck")
    assert list(nodes.holding("RaySupervisorActor")) == ["two"]
    assert list(nodes.holding("RayRankActor")) == ["two", "two"]
    job.end("struck")
    job.require_same_bits("struck", asked)
