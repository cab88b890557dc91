"""What calls have loaded is loaded again when a server is started again, at its address or on its cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from asking_inference import until
from attn_client import Client, ClientSettings
from attn_core.errors import AlreadyExists, PermissionDenied, Unavailable, UnknownName, WrongState
from attn_engine.client import EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings
from attn_gateway.records import Database, LoadedModel, LoadedModels
from attn_schema import DeploymentConfig, EngineConfig, ModelState, Prompt, SamplingParams
from attn_serve.recorded_models import RecordedModels
from attn_serve.service import InferenceGrpc
from attn_serve.sources import ModelSources
from local_cluster import LocalCluster
from low_rank import make_adapter

ONE_THREAD = EngineConfig(num_threads=1)
PLACE = "ray/test"
BOTH = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)


class Gateways:
    """Starts gateways that share records, each as in a process of its own."""

    def __init__(self, home: Path, url: str, stack: AsyncExitStack) -> None:
        self.home, self.url, self.cluster = home, url, LocalCluster()
        self._stack = stack
        stack.push_async_callback(self.cluster.stop)

    async def start(self, place: str = PLACE, configured: Collection[str] = ()) -> RecordedModels:
        """A gateway; its engines are those of the cluster, or without that place its own."""
        make: Any = self.cluster.make if place == PLACE else self._own
        database = Database(self.url)
        served = RecordedModels(ModelSources(self.home), make, database)
        await served.join(place, configured)

        async def end() -> None:
            await served.stop(0)
            database.close()

        self._stack.push_async_callback(end)
        return served

    def records(self) -> LoadedModels:
        database = Database(self.url)
        self._stack.callback(database.close)
        return LoadedModels(database)

    @staticmethod
    def _own(name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        del name, deployment
        return InProcess(folder, config)


@pytest.fixture
async def gateways(home: Path, url: str) -> AsyncIterator[Gateways]:
    async with AsyncExitStack() as stack:
        yield Gateways(home, url, stack)


async def tokens(served: RecordedModels, name: str, tenant: str | None = None) -> list[int]:
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    task = TextTask(prompt=Prompt(text="To be"), params=sampling, timeout=None, tenant=tenant or "")
    return [token.id async for delta in served.serving(name, tenant).engine.generate(task) for token in delta.tokens]


def states(served: RecordedModels, tenant: str | None = None) -> dict[str, ModelState]:
    return {info.name: info.state for info in served.listed(tenant)}


def serves(served: RecordedModels, *names: str) -> Callable[[], bool]:
    wanted = dict.fromkeys(names, ModelState.SERVING)
    return lambda: states(served) == wanted


@BOTH
async def test_a_gateway_of_a_cluster_joins_what_is_served_there_and_leaves_it_served(gateways: Gateways) -> None:
    a = await gateways.start()
    await a.load("tiny", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    await a.load("mine", "tiny", ONE_THREAD, tenant="ann", deployment=DeploymentConfig(replicas=1))
    b = await gateways.start()
    assert serves(b, "tiny", "mine")()
    assert set(states(b, "bob")) == {"tiny"}
    assert await tokens(b, "tiny") == await tokens(a, "tiny")
    assert await tokens(b, "mine", "ann") == await tokens(a, "mine", "ann")
    await a.load("later", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    await b.load("later", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    assert set(gateways.cluster.deployed.values()) == {1}, "nothing is deployed twice"
    await b.stop(0)
    assert serves(a, "tiny", "mine", "later")()
    assert await tokens(a, "tiny")


@BOTH
async def test_what_one_gateway_of_a_cluster_unloads_is_unloaded_at_all(
    gateways: Gateways,
) -> None:
    a = await gateways.start()
    await a.load("tiny", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    b = await gateways.start()
    alone = await tokens(b, "tiny")
    running = asyncio.create_task(tokens(b, "tiny"))
    await until(lambda: len(b.serving("tiny").engine.streams) == 1)
    await a.unload("tiny", 0)
    await until(lambda: not states(b))
    (outcome,) = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 10)
    assert outcome == alone or isinstance(outcome, Unavailable)
    assert gateways.records().at(PLACE) == []
    await b.load("tiny", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    assert await tokens(b, "tiny") == alone
    assert gateways.cluster.deployed["tiny"] == 2


async def test_a_load_that_fails_leaves_no_record(gateways: Gateways) -> None:
    served = await gateways.start("gateway/a")
    with pytest.raises(UnknownName, match="nowhere"):
        await served.load("m", "nowhere", ONE_THREAD)
    await served.load("other", "tiny", ONE_THREAD)
    with pytest.raises(AlreadyExists):
        await served.load("other", "tiny-linear", ONE_THREAD)
    assert [(one.name, one.source) for one in gateways.records().at("gateway/a")] == [("other", "tiny")]


@BOTH
async def test_what_cannot_be_loaded_again_is_listed_with_the_reason_until_it_is_unloaded(gateways: Gateways) -> None:
    records = gateways.records()
    left = {"called": "tiny", "crash": "tiny", "nowhere": "nowhere", "chat@2": "tiny"}
    for name, source in left.items():
        model = LoadedModel(place="gateway/a", owner="", name=name, source=source,
                            serving=name != "crash", engine='{"num_threads":1}')  # fmt: skip
        await asyncio.to_thread(records.put, model)
    a = await gateways.start("gateway/a")
    found = {info.name: info for info in a.listed()}
    serving = {name for name, info in found.items() if info.state is ModelState.SERVING}
    assert serving == {"called"}
    assert set(found) - serving == {"crash", "nowhere", "chat@2"}
    assert "died while it was being loaded" in found["crash"].state_detail
    assert "nowhere" in found["nowhere"].state_detail
    assert "chat@2" in found["chat@2"].state_detail, "of a server that had versions"
    assert a.described("crash") == found["crash"]
    for use in (a.serving, a.find):
        with pytest.raises(Unavailable, match="died while it was being loaded"):
            use("crash")
    with pytest.raises(PermissionDenied):
        await a.unload("crash", 0, "ann")
    await a.unload("crash", 0)
    await a.unload("chat@2", 0)
    await a.load("nowhere", "tiny", ONE_THREAD)
    assert {name for name, state in states(a).items() if state is ModelState.SERVING} == {*serving, "nowhere"}
    assert states(a).keys().isdisjoint({"crash", "chat@2"})
    assert {one.name for one in records.at("gateway/a") if one.serving} == {*serving, "nowhere"}


@BOTH
async def test_what_calls_loaded_is_loaded_again_after_an_orderly_end_as_it_was(gateways: Gateways, home: Path) -> None:
    make_adapter(home / "models" / "tiny", "again-adapter", 7)
    first = await gateways.start("gateway/a")
    for name in ("m1", "m2", "gone"):
        await first.load(name, "tiny", ONE_THREAD)
    await first.load("adapted", "again-adapter", ONE_THREAD, "m1", tenant="ann")
    before = await tokens(first, "adapted", "ann"), await tokens(first, "m2")
    await first.unload("gone", 0)
    await first.stop(0)
    # The next is given another model under one of the names by its options.
    second = await gateways.start("gateway/a", configured=["m2"])
    assert serves(second, "m1", "adapted")()
    assert states(second, "bob") == {"m1": ModelState.SERVING}
    assert await tokens(second, "adapted", "ann") == before[0]
    await second.load("m2", "tiny-linear", ONE_THREAD)
    await second.stop(0)
    third = await gateways.start("gateway/a")
    assert serves(third, "m1", "adapted")(), "options of the last start are not those of this one"
    await third.stop(0)
    # A gateway without a lasting place records nothing.
    passing = await gateways.start("")
    await passing.load("tiny", "tiny", ONE_THREAD)
    await passing.stop(0)
    assert {one.name for one in gateways.records().at("gateway/a")} == {"m1", "adapted"}
    assert gateways.records().at("") == []


async def test_records_that_are_away_stop_nothing_that_is_served(home: Path, postgres: Any) -> None:
    async with AsyncExitStack() as stack:
        served = await Gateways(home, postgres.url, stack).start("gateway/a")
        await served.load("tiny", "tiny", ONE_THREAD)
        before = await tokens(served, "tiny")
        postgres.stop()
        try:
            assert serves(served, "tiny")()
            assert await tokens(served, "tiny") == before
        finally:
            postgres.start()
        await served.load("two", "tiny", ONE_THREAD)
        assert serves(served, "tiny", "two")()


async def test_calls_that_need_the_records_are_refused_soon_while_those_have_lost_their_content(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "records.sqlite3"
    async with AsyncExitStack() as stack:
        served = await Gateways(home, f"sqlite:///{file}", stack).start("gateway/a")
        await served.load("tiny", "tiny", ONE_THREAD)
        before = await tokens(served, "tiny")
        await asyncio.to_thread(file.write_bytes, b"")
        for call in (served.load("two", "tiny", ONE_THREAD), served.unload("tiny", 0)):
            began = time.monotonic()
            with pytest.raises((Unavailable, WrongState)):
                await call
            assert time.monotonic() - began < 3.5
        assert await tokens(served, "tiny") == before


def test_a_gateway_comes_after_the_one_that_had_its_address_before_only_where_that_was_chosen(tmp_path: Path) -> None:
    def place(address: str, *, chosen: bool) -> str:
        service = InferenceGrpc(Cluster(ClusterSettings(home=tmp_path)))
        service.listens(address, chosen=chosen)
        return service._place()

    assert place("127.0.0.1:50051", chosen=True) == place("127.0.0.1:50051", chosen=True)
    assert place("127.0.0.1:50051", chosen=True) != place("127.0.0.1:50052", chosen=True)
    assert place("127.0.0.1:50051", chosen=False) == ""


class Process:
    """A gateway in a process of its own, at a port that it keeps when it is started again."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._home, self._folder = home, folder
        self.address, self.port = "", 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str]) -> None:
        """Serve when this returns; the first time at a port that is free."""
        script = Path(__file__).with_name("gateway_process.py")
        for attempt in range(20):
            # Not of those that the system gives to who asks for any.
            port = self.port or 10_000 + (os.getpid() * 7 + attempt * 1009 + id(self)) % 20_000
            ready = self._folder / f"ready-{port}-{attempt}-{time.monotonic_ns()}"
            log = ready.with_suffix(".log")
            with log.open("wb") as out:
                command = [sys.executable, str(script), str(self._home), str(port), str(ready)]
                self._process = subprocess.Popen(command, env=os.environ | environment, stdout=out, stderr=out)
            while not ready.exists() and self._process.poll() is None:
                time.sleep(0.05)
            if ready.exists():
                self.address, self.port = ready.read_text(), port
                return
            assert "in use" in log.read_text(), log.read_text()[-2000:]
        raise AssertionError("no port is free")

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def processes(home: Path, tmp_path: Path) -> Iterator[list[Process]]:
    (tmp_path / "models").symlink_to(home / "models")
    made = [Process(tmp_path, tmp_path), Process(tmp_path, tmp_path)]
    with ExitStack() as stack:
        for one in made:
            stack.callback(one.kill)
        yield made


@BOTH
@pytest.mark.cluster
def test_a_gateway_that_was_killed_serves_again_when_it_is_started_again(processes: list[Process], url: str) -> None:
    a, b = processes
    for one in processes:
        one.start({"ATTN_DATABASE": url})
    with Client(ClientSettings(address=a.address)) as client:
        client.models.load("mine", "tiny", timeout=120)
    a.kill()
    a.start({"ATTN_DATABASE": url})
    with Client(ClientSettings(address=a.address)) as client:
        assert [(info.name, info.state) for info in client.models.list()] == [("mine", ModelState.SERVING)]
        assert list(client.generate("mine", "To be", SamplingParams(max_new_tokens=4)))
    with Client(ClientSettings(address=b.address)) as client:
        assert not list(client.models.list()), "another address has models of its own"
