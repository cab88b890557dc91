"""Twenty kills in one run, of ranks, supervisors, servers and the database, cost not a bit of any loss.

On Ray a supervisor has a process of its own; without Ray it is a thread of the server.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import psutil
import pytest
from attn_gateway.ray_process import RayProcess
from attn_gateway.records import Database
from attn_train.store import JobStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

KILLS = 20


@pytest.fixture(params=["processes", "ray"])
def address(request):
    """Of a Ray that outlives the servers, or empty."""
    if request.param == "processes":
        yield ""
        return
    process = RayProcess(None, 3, 100 << 20)
    process.start()
    import ray

    yield ray.get_runtime_context().gcs_address
    process.stop()


def processes_of(words):
    """The processes below this one whose command line contains these words."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if words in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


class Server:
    """In a process of its own, over a database and a cluster that stay."""

    def __init__(self, command):
        self.command = command
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command)

    def kill(self):
        self.process.kill()
        self.process.wait()


def kill(kind, choose, postgres, server):
    if kind == "database":
        postgres.stop()
        time.sleep(choose.uniform(0.5, 2.0))
        postgres.start()
    elif kind == "server":
        server.kill()
        server.start()
    else:
        # Those of the kill before may have ended, while their last messages are still recorded.
        while not (found := processes_of(kind)):
            time.sleep(0.1)
        os.kill(choose.choice(found).pid, signal.SIGKILL)


def test_twenty_kills_at_random_cost_not_a_bit(
    tmp_path, postgres, address, server_command, unending, follow, monkeypatch
):
    postgres.execute("CREATE DATABASE kills")
    url = postgres.url.replace("/postgres?", "/kills?")
    monkeypatch.setenv("ATTN_DATABASE", url)
    asked = unending(25, dp_shard=2, max_failures=KILLS)
    choose = random.Random(20)
    kinds = ["ray::RayRankActor", "server", "database", "ray::RaySupervisorActor"]
    kinds = kinds if address else ["attn_train.group_worker", *kinds[1:3]]
    struck = []
    with Database(url) as database:
        store = JobStore(database)
        job = follow(store)
        store.submit("struck", asked)
        server = Server(server_command(tmp_path, address))
        try:
            for place in range(KILLS):
                job.steps_on_or_back("struck", choose.randint(5, 40))
                kind = kinds[place] if place < len(kinds) else choose.choice(kinds)
                kill(kind, choose, postgres, server)
                struck.append(kind)
                print(place + 1, kind, store.get("struck").step, flush=True)
            job.steps_on_or_back("struck", 20)
            job.end("struck")
            job.require_same_bits("struck", asked)
        finally:
            server.kill()
    assert len(struck) == KILLS
    assert set(struck) == set(kinds)
