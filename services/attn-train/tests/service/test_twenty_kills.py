"""Twenty kills in one run, of ranks, supervisors, servers and the database, cost not a bit of any loss."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from attn_gateway.ray_process import RayProcess
from attn_schema.training import CheckpointConfig, JobState
from attn_storage import Database
from attn_train.records import Stop
from attn_train.store import JobStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[4]
KILLS = 20
STEPS = 1_000_000
"""More than there is time for: the job is stopped."""

SERVER = """
import asyncio, sys
from pathlib import Path
from attn_gateway import Cluster, ClusterSettings, serving
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

async def main():
    cluster = Cluster(ClusterSettings(home=Path(sys.argv[1]), address=sys.argv[2]))
    async with serving([TrainingGrpc(cluster, TrainSettings(threads=1))]):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def postgres():
    path = ROOT / "packages/attn-storage/tests/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    if (reason := helper.why_not()) is not None:
        pytest.skip(reason)
    with helper.postgres_server(helper.programs()) as server:
        yield server


@pytest.fixture
def address():
    """Of a Ray that outlives the servers."""
    process = RayProcess(None, 3, 100 << 20)
    process.start()
    import ray

    yield ray.get_runtime_context().gcs_address
    process.stop()


def processes_of(word):
    """The processes of Ray's workers that run the actor class `word`."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if f"ray::{word}" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def losses_of(store, job_id):
    """Of each step what was measured: one value, if all attempts agree."""
    found, after = {}, 0
    while events := store.events(job_id, after, 1000):
        for event in events:
            after += 1
            assert event.id == after
            if event.metrics is not None and "loss" in event.metrics.values:
                found.setdefault(event.metrics.step, set()).add(event.metrics.values["loss"])
    return found


class Run:
    """A server in a process of its own, over a database and a cluster that stay."""

    def __init__(self, home, address, store, until):
        self.command = [sys.executable, "-c", SERVER, str(home), address]
        self.store, self.until = store, until
        self.start()

    def start(self):
        self.server = subprocess.Popen(self.command)

    def kill(self, kind, choose, postgres):
        if kind == "database":
            postgres.stop()
            time.sleep(choose.uniform(0.5, 2.0))
            postgres.start()
        elif kind == "server":
            self.server.kill()
            self.server.wait()
            self.start()
        else:
            os.kill(choose.choice(processes_of(kind)).pid, signal.SIGKILL)

    def steps_on(self, job_id, count):
        """Wait until so many more steps were measured."""
        first = self.store.get(job_id)
        assert not first.state.final, first

        def there():
            job = self.store.get(job_id)
            assert not job.state.final, job
            return job.state is JobState.RUNNING and abs(job.step - first.step) >= count

        self.until(there, f"{job_id} does not go on")

    def end(self, job_id):
        self.store.request_stop(job_id, Stop.SAVE)
        self.until(lambda: self.store.get(job_id).state.final, f"{job_id} does not end")


def test_twenty_kills_at_random_cost_not_a_bit(tmp_path, postgres, address, config, changed, words, monkeypatch, until):
    postgres.execute("CREATE DATABASE kills")
    url = postgres.url.replace("/postgres?", "/kills?")
    monkeypatch.setenv("ATTN_DATABASE", url)
    (tmp_path / "words.txt").write_text(words)
    asked = changed(
        config,
        data__dataset=str(tmp_path / "words.txt"),
        optimizer__steps=STEPS,
        evaluation__eval_steps=STEPS,
        workers=2,
        dp_shard=2,
        max_failures=KILLS,
    ).replace(checkpoint=CheckpointConfig(save_steps=25))
    choose, kinds = random.Random(20), ["RayRankActor", "RaySupervisorActor", "server", "database"]
    struck = []
    with Database(url) as database:
        store = JobStore(database)
        store.submit("struck", asked)
        run = Run(tmp_path, address, store, until)
        try:
            for place in range(KILLS):
                run.steps_on("struck", choose.randint(5, 40))
                kind = kinds[place % 4] if place < 4 else choose.choice(kinds)
                run.kill(kind, choose, postgres)
                struck.append(kind)
                print(place + 1, kind, store.get("struck").step, flush=True)
            run.steps_on("struck", 20)
            run.end("struck")
            last = store.get("struck").step
            store.submit("undisturbed", asked)
            until(lambda: store.get("undisturbed").step >= last, "the undisturbed run does not get there")
            run.end("undisturbed")
            found, wanted = losses_of(store, "struck"), losses_of(store, "undisturbed")
        finally:
            run.server.kill()
            run.server.wait()
    assert len(struck) == KILLS
    assert set(struck) == set(kinds)
    assert sorted(found) == list(range(1, last + 1))
    assert all(len(values) == 1 for values in found.values())
    assert all(wanted[step] == values for step, values in found.items())
