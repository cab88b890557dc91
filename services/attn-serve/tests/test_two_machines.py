"""Streams go on, token for token, where a machine is cut off, a gateway is killed, and the records or the store of
models are away."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attn_client import Client, ClientSettings
from attn_gateway.records import ArtifactStore, Database, ModelRecord, ModelRecords
from attn_schema import SamplingParams, StructuredOutput
from two_machines import CACHE_BYTES, Gateway, Machines, wait_for, why_no_network

pytest.importorskip("fastapi", reason="needs attn-serve[replicas]")
pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[3]
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
PATTERN = StructuredOutput(regex="[a-z ]{190}[.]")
KINDS = {
    "greedy": LONG,
    "sampled": LONG.replace(temperature=1.0, seed=5),
    "several": LONG.replace(temperature=1.0, seed=6, n=3, top_logprobs=2),
    "structured": SamplingParams(max_new_tokens=200, temperature=1.0, seed=7, structured_output=PATTERN),
    "beams": SamplingParams(max_new_tokens=60, num_beams=3, n=2),
}
AT_ONCE = ("beams",)
"""Kinds that return nothing before their end, so that there are no gaps between their messages."""
STREAMS = 10
STORE = "s3://bucket/models"
OUTAGE_SECONDS = 20.0
"""How long the store of models answers 503."""


def storage_helper(name: str) -> ModuleType:
    """A module beside the tests of the records."""
    path = ROOT / f"services/attn-gateway/tests/records/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def postgres() -> Iterator[Any]:
    """The server of the records."""
    helper = storage_helper("postgres_server")
    reason = helper.why_not()
    if reason is not None:
        pytest.skip(reason)
    with helper.postgres_server(helper.programs()) as server:
        yield server


@pytest.fixture(scope="module")
def machines(home: Path) -> Iterator[Machines]:
    reason = why_no_network()
    if reason is not None:
        pytest.skip(reason)
    made = Machines(home)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """The store of models."""
    with storage_helper("failing_bucket").failing_bucket() as running:
        running.lists = True
        yield running


@pytest.fixture(scope="module")
def gateways(machines: Machines, postgres: Any, bucket: Any) -> list[tuple[Gateway, str]]:
    """Two gateways with their addresses; they serve "tiny" from one replica on each machine."""
    options = ["--model", "tiny", "--num-threads", "1", "--kv-cache-memory-bytes", str(CACHE_BYTES), "--replicas"]
    # A cluster that is still starting has room for one.
    shared = {"ATTN_DATABASE": postgres.url, "ATTN_ARTIFACTS": STORE, **bucket.environment}
    made = [machines.gateway(*options, "2", **shared) for _ in range(2)]
    return [(gateway, gateway.wait()) for gateway in made]


@dataclass
class Report:
    """What happened to the streams of a run."""

    requests: int = 0
    resumed: int = 0
    bad: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "resumed": self.resumed,
            "lost, doubled or different": self.bad,
            "gap largest [s]": round(max(self.gaps, default=0.0), 2),
        }


def completions(client: Client, kind: str, report: Report | None = None, model: str = "tiny") -> dict[int, list[int]]:
    """The tokens of each completion."""
    found: dict[int, list[int]] = {}
    last, gap, resumptions = None, 0.0, 0
    for delta in client.generate(model, "To be or not to be", KINDS[kind]):
        now = time.monotonic()
        gap, last = max(gap, now - (last or now)), now
        found.setdefault(delta.index, []).extend(token.id for token in delta.tokens)
        resumptions = max(resumptions, delta.resumptions)
    if report is not None:
        report.requests += 1
        report.resumed += resumptions > 0
        if kind not in AT_ONCE:
            report.gaps.append(gap)
    return found


def under_streams(addresses: list[str], fault: Callable[[Client], None], after: float = 5.0) -> Report:
    """Keep streams running through both gateways while something happens, and some seconds longer."""
    report, ended = Report(), threading.Event()
    first, other = (ClientSettings(address=",".join(order)) for order in (addresses, addresses[::-1]))
    with Client(first) as one, Client(other) as two:
        wanted = {kind: completions(one, kind) for kind in KINDS}

        def ask(number: int) -> None:
            kind = list(KINDS)[number % len(KINDS)]
            while not ended.is_set():
                try:
                    if completions((one, two)[number % 2], kind, report) != wanted[kind]:
                        report.bad.append(f"{kind}: other tokens")
                except Exception as error:  # noqa: BLE001 - whatever it is, the request is lost
                    report.bad.append(f"{kind}: {type(error).__name__}: {error}")

        with ThreadPoolExecutor(STREAMS) as pool:
            asked = [pool.submit(ask, number) for number in range(STREAMS)]
            try:
                time.sleep(2)
                fault(two)
                time.sleep(after)
            finally:
                ended.set()
            for one_asked in asked:
                one_asked.result()
    print(json.dumps(report.figures()))
    return report


def replicas(client: Client) -> int:
    return client.models.get("tiny").replicas


class TestTwoMachines:
    """In this order: the last ones leave less than there was."""

    def test_a_machine_that_is_cut_off_loses_no_stream_and_is_used_again(
        self, machines: Machines, gateways: list[tuple[Gateway, str]]
    ) -> None:
        def cut(client: Client) -> None:
            assert replicas(client) == 2
            machines.cut()
            wait_for(lambda: replicas(client) == 1, "the loss to be seen", 30)
            machines.mend()
            wait_for(lambda: replicas(client) == 2, "the machine to be used again", 120)

        report = under_streams([address for _, address in gateways], cut)
        assert report.bad == []
        assert report.resumed >= 1
        assert max(report.gaps) < 30, "a replica that is silent is given up after 5 seconds"

    def test_records_that_are_away_stop_no_stream(self, postgres: Any, gateways: list[tuple[Gateway, str]]) -> None:
        def restart(client: Client) -> None:
            postgres.stop()
            time.sleep(5)
            assert replicas(client) == 2
            postgres.start()

        assert under_streams([address for _, address in gateways], restart).bad == []
        with Client(ClientSettings(address=gateways[0][1])) as client:
            client.models.load("again", "tiny-linear", timeout=120)
            client.models.unload("again")

    def test_a_store_of_models_that_is_away_stops_no_stream_and_delays_what_is_loaded_from_it(
        self, postgres: Any, bucket: Any, gateways: list[tuple[Gateway, str]], home: Path, tmp_path: Path
    ) -> None:
        ArtifactStore(STORE, tmp_path, **bucket.options).publish("stored", home / "models" / "tiny")
        with Database(postgres.url) as database:
            ModelRecords(database).record(ModelRecord("stored", "", artifact="stored"))
        found = {}

        def fail(client: Client) -> None:
            began = time.monotonic()
            bucket.fails_until = began + OUTAGE_SECONDS
            client.models.load("stored", "stored", timeout=300)
            assert time.monotonic() - began >= OUTAGE_SECONDS
            found["stored"] = completions(client, "greedy", model="stored")
            found["tiny"] = completions(client, "greedy")
            client.models.unload("stored")

        assert under_streams([address for _, address in gateways], fail).bad == []
        assert bucket.failed >= 2
        assert found["stored"] == found["tiny"]

    def test_a_gateway_that_is_killed_loses_no_stream(self, gateways: list[tuple[Gateway, str]]) -> None:
        def kill(client: Client) -> None:
            assert client._connection._at == 0
            gateways[1][0].kill()
            wait_for(lambda: client._connection._at == 1, "its streams to go elsewhere", 60)

        assert under_streams([address for _, address in gateways], kill).bad == []
