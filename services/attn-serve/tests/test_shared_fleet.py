"""Gateways that share their records show the same models; those of one cluster serve them together."""

from __future__ import annotations

import asyncio
import os
import shutil
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
from attn_core.errors import AlreadyExists, AttnError, PermissionDenied, Unavailable, UnknownName, WrongState
from attn_engine.client import EngineClient
from attn_engine.host import TextTask
from attn_gateway import Cluster, ClusterSettings
from attn_gateway.records import Database, GatewayRecord, GatewayRecords, ServedModel, ServedState
from attn_gateway.records.leases import this_process
from attn_gateway.records.tables import served_models
from attn_schema import DeploymentConfig, EngineConfig, ModelState, Prompt, SamplingParams
from attn_serve import shared_fleet
from attn_serve.in_process import InProcess
from attn_serve.other_models import ServedElsewhere
from attn_serve.service import InferenceGrpc
from attn_serve.shared_fleet import SharedFleet
from attn_serve.sources import ModelSources
from local_cluster import LocalCluster
from low_rank import make_adapter
from sqlalchemy import delete

ONE_THREAD = EngineConfig(num_threads=1)
PLACE = "ray/test"
GONE = "another-machine/1/0.00"
"""A process of which only its heartbeat is known."""
BOTH = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)


def record(name: str, place: str, process: str = "") -> GatewayRecord:
    process = process or this_process()
    return GatewayRecord(id=name, place=place, address=f"{name}:50051", host="here", process=process, version="0")


class Gateways:
    """Makes fleets that share records, each as in a process of its own."""

    def __init__(self, home: Path, url: str, stack: AsyncExitStack) -> None:
        self.home, self.url, self.cluster = home, url, LocalCluster()
        self._stack = stack
        stack.push_async_callback(self.cluster.stop)

    async def start(
        self, name: str, place: str = PLACE, home: Path | None = None, configured: Collection[str] = ()
    ) -> SharedFleet:
        """A gateway; without a shared place its engines are its own."""
        shared = place == PLACE
        make: Any = self.cluster.make if shared else self._own
        database = Database(self.url)
        fleet = SharedFleet(ModelSources(home or self.home), make, database)
        await fleet.join(record(name, place), configured, shared=shared)

        async def end() -> None:
            await fleet.stop(0)
            database.close()

        self._stack.push_async_callback(end)
        return fleet

    def records(self) -> GatewayRecords:
        database = Database(self.url)
        self._stack.callback(database.close)
        return GatewayRecords(database)

    @staticmethod
    def _own(name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        del name, deployment
        return InProcess(folder, config)


@pytest.fixture
async def gateways(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateways]:
    monkeypatch.setattr(shared_fleet, "POLL_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        yield Gateways(home, url, stack)


async def tokens(fleet: SharedFleet, name: str, tenant: str | None = None) -> list[int]:
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    task = TextTask(prompt=Prompt(text="To be"), params=sampling, timeout=None, tenant=tenant or "")
    return [token.id async for delta in fleet.engine(name, tenant).generate(task) for token in delta.tokens]


def states(fleet: SharedFleet, tenant: str | None = None) -> dict[str, ModelState]:
    return {info.name: info.state for info in fleet.listed(tenant)}


def serves(fleet: SharedFleet, *names: str) -> Callable[[], bool]:
    wanted = dict.fromkeys(names, ModelState.SERVING)
    return lambda: states(fleet) == wanted


@BOTH
async def test_what_one_gateway_loads_scales_and_unloads_the_others_do_too(gateways: Gateways) -> None:
    a, b = await gateways.start("a"), await gateways.start("b")
    await a.load("tiny", "tiny", ONE_THREAD, deployment=DeploymentConfig(replicas=1))
    await until(serves(b, "tiny"))
    assert await tokens(b, "tiny") == await tokens(a, "tiny")
    assert gateways.cluster.deployed == {"tiny": 1}
    late = await gateways.start("late")
    assert serves(late, "tiny")(), "it serves what there is before it is ready"
    await b.scale("tiny", DeploymentConfig(replicas=2))
    await until(lambda: all(fleet.listed()[0].replicas == 2 for fleet in (a, b, late)))
    await until(lambda: a.find("tiny").deployment.replicas == 2)
    await b.unload("tiny", 5)
    await until(lambda: all(not fleet.listed() for fleet in (a, b, late)))
    with pytest.raises(UnknownName):
        a.engine("tiny")
    assert gateways.cluster.groups == {}
    await a.load("tiny", "tiny-linear", ONE_THREAD)
    await until(serves(b, "tiny"))
    assert b.find("tiny").info.mechanisms == ("attn-variants/linear",)


@BOTH
async def test_a_name_that_several_load_at_once_is_loaded_once(gateways: Gateways) -> None:
    fleets = [await gateways.start(name) for name in "abc"]
    loaded = await asyncio.gather(*(fleet.load("tiny", "tiny", ONE_THREAD) for fleet in fleets))
    assert [model.info.state for model in loaded] == [ModelState.SERVING] * 3
    assert gateways.cluster.deployed == {"tiny": 1}
    first, *others = [await tokens(fleet, "tiny") for fleet in fleets]
    assert others == [first, first]
    with pytest.raises(AlreadyExists, match="served from tiny"):
        await fleets[1].load("tiny", "tiny-linear", ONE_THREAD)
    loads = fleets[0].load("two", "tiny", ONE_THREAD), fleets[1].load("two", "tiny-linear", ONE_THREAD)
    found = await asyncio.gather(*loads, return_exceptions=True)
    assert sum(isinstance(one, AlreadyExists) for one in found) == 1


async def test_a_load_that_fails_frees_the_name_for_others(gateways: Gateways) -> None:
    a, b = await gateways.start("a"), await gateways.start("b")
    for fleet in (a, b):
        with pytest.raises(UnknownName, match="nowhere"):
            await fleet.load("m", "nowhere", ONE_THREAD)
    await b.load("m", "tiny", ONE_THREAD)
    await until(serves(a, "m"))


async def test_a_model_of_one_tenant_does_not_exist_for_another_at_any_gateway(gateways: Gateways) -> None:
    a, b = await gateways.start("a"), await gateways.start("b")
    await a.load("mine", "tiny", ONE_THREAD, tenant="ann")
    await a.load("common", "tiny", ONE_THREAD)
    await until(serves(b, "mine", "common"))
    assert set(states(b, "ann")) == {"mine", "common"}
    assert set(states(b, "bob")) == {"common"}
    for use in (lambda: b.engine("mine", "bob"), lambda: b.described("mine", "bob")):
        with pytest.raises(UnknownName):
            use()
    with pytest.raises(UnknownName):
        await b.unload("mine", 0, "bob")
    with pytest.raises(PermissionDenied):
        await b.unload("common", 0, "ann")
    await b.load("mine", "tiny-linear", ONE_THREAD, tenant="bob")
    await until(lambda: len(a.models()) == 3 and all(one.ready.is_set() for one in a.models()))
    assert set(states(a, "bob")) == {"mine", "common"}
    for fleet in (a, b):
        assert fleet.find("mine", "ann").info.mechanisms == ("attn-variants/mha",)
        assert fleet.find("mine", "bob").info.mechanisms == ("attn-variants/linear",)
    own = await gateways.start("own", place="gateway/own")
    assert set(states(own, "ann")) == {"mine", "common"}
    with pytest.raises(ServedElsewhere):
        own.engine("mine", "ann")
    with pytest.raises(UnknownName):
        own.engine("yours", "bob")


async def test_conversations_go_to_the_same_version_at_every_gateway(gateways: Gateways) -> None:
    a, b = await gateways.start("a"), await gateways.start("b")
    await a.load("m@1", "tiny", ONE_THREAD)
    await a.load("m@2", "tiny-linear", ONE_THREAD, traffic=0.25)

    def shares(fleet: SharedFleet) -> dict[str, float]:
        return {info.name: info.traffic for info in fleet.listed()}

    await until(lambda: serves(b, "m@1", "m@2")() and shares(b) == {"m@1": 0.75, "m@2": 0.25})
    prompts = [Prompt(text=f"line {number}") for number in range(40)]
    assert len({b.choose("m", prompt).name for prompt in prompts}) == 2
    assert [a.choose("m", prompt).name for prompt in prompts] == [b.choose("m", prompt).name for prompt in prompts]
    b.set_traffic("m", {"m@2": 0.5})
    await b.publish()
    await until(lambda: shares(a) == {"m@1": 0.5, "m@2": 0.5})
    late = await gateways.start("late")
    assert shares(late) == shares(a)
    await b.replace_others("m@2")
    await until(lambda: shares(a) == shares(b) == shares(late) == {"m@2": 1.0}, 60)
    assert gateways.cluster.deployed == {"m@1": 1, "m@2": 1}


async def test_an_adapter_is_used_at_every_gateway_until_one_unloads_it(gateways: Gateways, home: Path) -> None:
    make_adapter(home / "models" / "tiny", "tuned-here", 7)
    a, b = await gateways.start("a"), await gateways.start("b")
    await a.load("tiny", "tiny", ONE_THREAD)
    await a.load("tuned", "tuned-here", ONE_THREAD)
    await until(serves(b, "tiny", "tuned"))
    late = await gateways.start("late")
    tuned = await tokens(a, "tuned")
    assert tuned != await tokens(a, "tiny")
    assert await tokens(b, "tuned") == await tokens(late, "tuned") == tuned
    await b.unload("tuned", 0)
    await until(lambda: serves(a, "tiny")() and serves(late, "tiny")())
    await a.unload("tiny", 0)
    await until(lambda: not b.listed())


async def test_a_gateway_that_cannot_serve_what_others_do_says_why_and_leaves_it_alone(
    gateways: Gateways, home: Path, tmp_path: Path
) -> None:
    a = await gateways.start("a")
    await a.load("tiny", "tiny", ONE_THREAD)
    (tmp_path / "empty-home" / "models").mkdir(parents=True)
    other = await gateways.start("other", home=tmp_path / "empty-home")
    (told,) = other.listed()
    assert told.state is ModelState.FAILED
    assert "this one failed to: unknown model 'tiny'" in told.state_detail
    with pytest.raises(Unavailable, match="this one failed to"):
        other.engine("tiny")
    assert await tokens(a, "tiny")
    assert list(gateways.cluster.groups) == ["tiny"]
    shutil.copytree(home / "models" / "tiny", tmp_path / "empty-home" / "models" / "tiny")
    assert await other.load("tiny", "tiny", ONE_THREAD)
    assert await tokens(other, "tiny") == await tokens(a, "tiny")


async def test_what_a_gateway_of_the_cluster_had_begun_when_it_died_another_one_does(gateways: Gateways) -> None:
    records, b = gateways.records(), await gateways.start("b")
    await b.load("half", "tiny", ONE_THREAD)
    # "dead" has no record of its own any more: it is gone.
    loading = ServedModel(place=PLACE, owner="", name="m", gateway="dead", state=ServedState.LOADING, source="tiny")
    await asyncio.to_thread(records.claim, loading, shared=True)
    half = next(one for one in records.world().models if one.name == "half")
    await asyncio.to_thread(records.write, [(half, {"state": ServedState.DRAINING, "gateway": "dead"})])
    await until(serves(b, "m"))
    assert list(gateways.cluster.groups) == ["m"]


async def test_models_stay_served_where_their_records_are_lost(gateways: Gateways) -> None:
    a, b = await gateways.start("a"), await gateways.start("b")
    await a.load("tiny", "tiny", ONE_THREAD)
    await until(serves(b, "tiny"))
    engines = a.engine("tiny"), b.engine("tiny")
    records = gateways.records()
    with records.database.writing() as connection:
        connection.execute(delete(served_models))
    await until(lambda: [one.name for one in records.world().models] == ["tiny"])
    assert (a.engine("tiny"), b.engine("tiny")) == engines
    assert gateways.cluster.deployed == {"tiny": 1}


async def test_a_gateway_with_engines_of_its_own_says_where_others_serve(gateways: Gateways) -> None:
    a, b = await gateways.start("a", "gateway/a"), await gateways.start("b", "gateway/b")
    await a.load("tiny", "tiny", ONE_THREAD)
    await until(lambda: states(b) == {"tiny": ModelState.ELSEWHERE})
    assert b.described("tiny").num_parameters == a.described("tiny").num_parameters
    for use in (b.engine, b.find):
        with pytest.raises(ServedElsewhere, match="by the gateway a:50051"):
            use("tiny")
    await b.load("tiny", "tiny", ONE_THREAD)
    assert await tokens(b, "tiny") == await tokens(a, "tiny")
    await a.unload("tiny", 0)
    assert serves(b, "tiny")()
    await until(lambda: states(a) == {"tiny": ModelState.ELSEWHERE})


@BOTH
async def test_a_gateway_that_died_is_shown_as_gone_and_the_next_of_its_address_serves_what_it_did(
    gateways: Gateways,
) -> None:
    records, b = gateways.records(), await gateways.start("b", "gateway/b")
    await asyncio.to_thread(records.join, record("dead", "gateway/a", GONE))
    left = {"called": "", "option": "configured", "crash": "loading", "nowhere": "", "m@1": "", "m@2": ""}
    for name, kind in left.items():
        state = ServedState.LOADING if kind == "loading" else ServedState.SERVING
        source = "tiny" if name != "nowhere" else name
        traffic = {"m@1": 0.75, "m@2": 0.25}.get(name, 1.0)
        model = ServedModel(place="gateway/a", owner="", name=name, gateway="dead", state=state, source=source,
                            configured=kind == "configured", traffic=traffic, engine='{"num_threads":1}')  # fmt: skip
        await asyncio.to_thread(records.claim, model, shared=False)
    await until(lambda: set(states(b)) == set(left))
    assert {name for name, state in states(b).items() if state is not ModelState.ELSEWHERE} == {"crash"}
    with records.database.writing() as connection:
        connection.exec_driver_sql("UPDATE gateways SET heartbeat = heartbeat - 60 WHERE id = 'dead'")
    await until(lambda: set(states(b).values()) == {ModelState.FAILED})
    with pytest.raises(Unavailable, match="dead:50051, which is gone"):
        b.engine("called")
    a = await gateways.start("a", "gateway/a")
    assert set(records.world().gateways) == {"a", "b"}
    found = {info.name: info for info in a.listed()}
    serving = {name for name, info in found.items() if info.state is ModelState.SERVING}
    assert serving == {"called", "m@1", "m@2"}
    assert (found["m@1"].traffic, found["m@2"].traffic) == (0.75, 0.25)
    assert set(found) - serving == {"crash", "nowhere"}
    assert "died while it was being loaded" in found["crash"].state_detail
    assert "nowhere" in found["nowhere"].state_detail
    with pytest.raises(PermissionDenied):
        await a.unload("crash", 0, "ann")
    await a.unload("crash", 0)
    await a.load("nowhere", "tiny", ONE_THREAD)
    assert {name for name, state in states(a).items() if state is ModelState.SERVING} == {*serving, "nowhere"}
    assert "crash" not in states(a)


@BOTH
async def test_what_calls_loaded_is_loaded_again_after_an_orderly_end_as_it_was(gateways: Gateways, home: Path) -> None:
    make_adapter(home / "models" / "tiny", "again-adapter", 7)
    first = await gateways.start("first", "gateway/a")
    for name in ("m@1", "m@2", "gone"):
        await first.load(name, "tiny", ONE_THREAD)
    await first.load("adapted", "again-adapter", ONE_THREAD, "m@1", tenant="ann")
    first.set_traffic("m@1", {"m@1": 0.25, "m@2": 0.75})
    before = await tokens(first, "adapted", "ann"), await tokens(first, "m@2")
    await first.unload("gone", 0)
    await first.stop(0)
    # The next is given another model under one of the names by its options.
    second = await gateways.start("second", "gateway/a", configured=["m@2"])
    assert serves(second, "m@1", "adapted")()
    assert states(second, "bob") == {"m@1": ModelState.SERVING}
    assert second.find("m@1").info.traffic == 0.25
    assert await tokens(second, "adapted", "ann") == before[0]
    await second.load("m@2", "tiny-linear", ONE_THREAD)
    await second.stop(0)
    third = await gateways.start("third", "gateway/a")
    assert serves(third, "m@1", "adapted")(), "options of the last start are not those of this one"
    await third.stop(0)
    # A gateway without a lasting place leaves nothing behind.
    passing = await gateways.start("passing", "gateway/passing")
    await passing.load("tiny", "tiny", ONE_THREAD)
    await passing.stop(0)
    found = {(one.place, one.name) for one in gateways.records().world().models}
    assert found == {("gateway/a", "m@1"), ("gateway/a", "adapted")}


async def test_records_that_are_away_stop_nothing_that_is_served(
    home: Path, postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_fleet, "POLL_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        gateways = Gateways(home, postgres.url, stack)
        a, b = await gateways.start("a"), await gateways.start("b")
        await a.load("tiny", "tiny", ONE_THREAD)
        await until(serves(b, "tiny"))
        before = await tokens(b, "tiny")
        postgres.stop()
        try:
            for fleet in (a, b):
                assert serves(fleet, "tiny")()
                assert await tokens(fleet, "tiny") == before
        finally:
            postgres.start()
        await b.load("two", "tiny", ONE_THREAD)
        await until(serves(a, "tiny", "two"))


async def test_calls_that_need_the_records_are_refused_soon_while_those_have_lost_their_content(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "records.sqlite3"
    async with AsyncExitStack() as stack:
        fleet = await Gateways(home, f"sqlite:///{file}", stack).start("a", "gateway/a")
        await fleet.load("tiny", "tiny", ONE_THREAD)
        before = await tokens(fleet, "tiny")
        await asyncio.to_thread(file.write_bytes, b"")
        for call in (fleet.load("two", "tiny", ONE_THREAD), fleet.unload("tiny", 0)):
            began = time.monotonic()
            with pytest.raises((Unavailable, WrongState)):
                await call
            assert time.monotonic() - began < 3.5
        assert await tokens(fleet, "tiny") == before


def test_a_gateway_comes_after_the_one_that_had_its_address_before_only_where_that_was_chosen(tmp_path: Path) -> None:
    def place(address: str, *, chosen: bool) -> str:
        service = InferenceGrpc(Cluster(ClusterSettings(home=tmp_path)))
        service.listens(address, chosen=chosen)
        return service._gateway(shared=False).place

    assert place("127.0.0.1:50051", chosen=True) == place("127.0.0.1:50051", chosen=True)
    assert place("127.0.0.1:50051", chosen=True) != place("127.0.0.1:50052", chosen=True)
    assert place("127.0.0.1:50051", chosen=False) != place("127.0.0.1:50051", chosen=False)


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
def test_a_gateway_killed_under_others_is_seen_and_serves_again_when_it_is_started_again(
    processes: list[Process], url: str
) -> None:
    a, b = processes
    for one in processes:
        one.start({"ATTN_DATABASE": url})

    def seen(address: str) -> dict[str, tuple[ModelState, str]]:
        with Client(ClientSettings(address=address)) as client:
            return {info.name: (info.state, info.state_detail) for info in client.models.list()}

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, (seen(a.address), seen(b.address))
            time.sleep(0.1)

    with Client(ClientSettings(address=a.address)) as client:
        client.models.load("mine", "tiny", timeout=120)
    wait(lambda: seen(b.address) == {"mine": (ModelState.ELSEWHERE, f"by the gateway {a.address}")})
    a.kill()
    gone = f"it was served by the gateway {a.address}, which is gone"
    wait(lambda: seen(b.address) == {"mine": (ModelState.FAILED, gone)})
    a.start({"ATTN_DATABASE": url})
    assert seen(a.address)["mine"][0] is ModelState.SERVING
    wait(lambda: seen(b.address)["mine"][0] is ModelState.ELSEWHERE)
    with Client(ClientSettings(address=b.address)) as client:
        with pytest.raises(AttnError, match=f"by the gateway {a.address}"):
            list(client.generate("mine", "To be"))
        client.models.load("mine", "tiny", timeout=120)
        assert list(client.generate("mine", "To be", SamplingParams(max_new_tokens=4)))
