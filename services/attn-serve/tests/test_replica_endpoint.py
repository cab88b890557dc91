"""The endpoint of a replica: whom it lets in, whose outputs go where, and what a lost connection leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asking_inference import until
from attn_core.errors import AttnError, InternalError, InvalidValue, LayerFailed, Unavailable, error_of_reasons
from attn_engine.client import EmbedTask, EngineLost, Streams, TextTask
from attn_engine.host.request_preparation import LANES
from attn_engine.sequence import NoTokenError
from attn_gateway import ReplicaTls
from attn_gateway.command import replica_tls_of
from attn_schema import (
    AttentionMapsRequest,
    EngineConfig,
    PartialCompletion,
    Prompt,
    Resumption,
    SamplingParams,
    ScoringParams,
    ServerConfig,
    StructuredOutput,
)
from attn_serve import replica_client
from attn_serve import replica_messages as messages
from attn_serve.engine_server import EngineServer
from attn_serve.replica_client import ReplicaClient
from local_replicas import signed


@pytest.fixture
async def server(home: Path) -> AsyncIterator[EngineServer]:
    config = EngineConfig(num_threads=1)
    made = EngineServer(home / "models" / "tiny", config)
    await made.start("127.0.0.1")
    yield made
    await made.drain(0)


class Gateway:
    """One gateway's side: its streams and its connection."""

    def __init__(self, server: EngineServer, tls: ReplicaTls | None = None, **changes: Any) -> None:
        self.streams = Streams()
        self.lost: list[ReplicaClient] = []
        self.client = ReplicaClient(replace(server.address, **changes), self.streams, self.lost.append, tls)

    async def __aenter__(self) -> Gateway:
        await self.client.connect()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.close()

    async def tokens(self, task: TextTask) -> list[int]:
        found = self.streams.follow(task, self.client.submit, self.client.cancel)
        return [token.id async for delta in found for token in delta.tokens]


def task(tokens: int = 20, **changes: Any) -> TextTask:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **changes)
    return TextTask(prompt=Prompt(text="To be"), params=params, tenant="ann")


def idle(server: EngineServer) -> bool:
    stats = server.engine.host.stats()
    return stats.running + stats.waiting + stats.kv_tokens_used == 0


async def test_two_gateways_share_a_replica_and_each_gets_its_own(server: EngineServer) -> None:
    async with Gateway(server) as first, Gateway(server) as second:
        asked = [task(seed=seed, temperature=1.0) for seed in range(8)]
        alone = [await first.tokens(replace(one, id=f"alone {place}")) for place, one in enumerate(asked)]
        mixed = [(first, second)[place % 2].tokens(one) for place, one in enumerate(asked)]
        assert await asyncio.gather(*mixed) == alone
        assert not first.client.tasks
        assert len({tuple(ids) for ids in alone}) > 1


async def test_calls_answer_as_the_host_does(server: EngineServer) -> None:
    maps = AttentionMapsRequest(model="tiny", prompt=Prompt(text="To be"), layers=(0,))
    async with Gateway(server) as gateway:
        for method, *arguments in (("tokenize", Prompt(text="To be")), ("attention_maps", maps, "")):
            assert await gateway.client.call(method, *arguments) == await getattr(server.engine, method)(*arguments)
        before = server.engine.host.stats()
        stats = await gateway.client.call("stats")
        assert before.cpu_seconds <= stats.cpu_seconds <= server.engine.host.stats().cpu_seconds
        now = {name: getattr(before, name) for name in ("cpu_seconds", "resident_memory_bytes")}
        assert msgspec.structs.replace(stats, **now) == before
        with pytest.raises(InvalidValue, match="prompt") as refused:
            await gateway.tokens(replace(task(), prompt=Prompt(text="")))
        assert refused.value.metadata["field"] == "prompt"
        with pytest.raises(AttnError, match="not an encoder"):
            await gateway.client.call("embed", EmbedTask(texts=("a",)))


@pytest.mark.parametrize("secret", ["", "x" * 43])
async def test_who_does_not_know_the_secret_is_not_let_in(server: EngineServer, secret: str) -> None:
    gateway = Gateway(server, secret=secret)
    with pytest.raises(EngineLost):
        await gateway.client.connect()
    stranger = Gateway(server, secret=secret)
    with pytest.raises(EngineLost, match="UNAUTHENTICATED"):
        await stranger.client.call("stats")
    await stranger.client.close()
    assert server.engine.host.stats().computed_tokens == 0


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x82\xa6method\xa6submit\xa9arguments\x90", messages.encode_call("stop")]
)
async def test_what_is_no_call_is_refused_and_the_replica_goes_on(server: EngineServer, data: bytes) -> None:
    async with Gateway(server) as gateway:
        answer = await gateway.client._call_method(data, metadata=gateway.client._metadata)
        with pytest.raises(InternalError, match="invalid call"):
            messages.decode_answer("stats", answer)
        assert len(await gateway.tokens(task())) == 20


async def test_what_a_lost_gateway_asked_is_computed_for_nobody(server: EngineServer) -> None:
    async with Gateway(server) as other:
        gateway = Gateway(server)
        await gateway.client.connect()
        running = [asyncio.create_task(gateway.tokens(task(200))) for _ in range(3)]
        await until(lambda: len(gateway.client.tasks) == 3 and server.engine.host.stats().generated_tokens >= 10)
        await gateway.client.close()
        await until(lambda: idle(server))
        assert server.engine.host.stats().generated_tokens < 3 * 200
        assert len(await other.tokens(task())) == 20
        for one in running:
            one.cancel()


async def test_a_replica_that_falls_silent_is_lost(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its machine is cut off: nothing says that the connection is gone."""
    monkeypatch.setattr(replica_client, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.05)
    async with Gateway(server) as gateway:
        await asyncio.sleep(2.5)
        assert not gateway.lost
        monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 60.0)
        await until(lambda: gateway.lost)
        assert gateway.lost == [gateway.client]


async def test_a_call_in_flight_when_the_connection_is_closed_goes_on_elsewhere(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not cancelled: only its caller may do that."""
    submit, held = server.engine.host.submit, threading.Event()
    monkeypatch.setattr(server.engine.host, "submit", lambda task: (held.wait(120), submit(task)))
    gateway = Gateway(server)
    await gateway.client.connect()
    lost, cancelled = (asyncio.create_task(gateway.tokens(task())) for _ in range(2))
    await until(lambda: len(gateway.client.tasks) == 2)
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await gateway.client.close()
    with pytest.raises(EngineLost):
        await lost
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    held.set()


async def test_a_task_that_is_cancelled_while_it_waits_to_be_prepared_is_not_begun(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, held, begun = server.engine.host.submit, threading.Event(), []
    monkeypatch.setattr(
        server.engine.host, "submit", lambda task: (begun.append(task.id), held.wait(120), submit(task))
    )
    async with Gateway(server) as gateway:
        before = [asyncio.create_task(gateway.tokens(task())) for _ in range(LANES["text"])]
        await until(lambda: len(begun) == LANES["text"])
        waiting = task()
        submitting = asyncio.create_task(gateway.client.submit(waiting))
        await until(lambda: any(waiting.id in session.tasks for session in server._sessions.values()))
        await gateway.client.cancel(waiting.id)
        with pytest.raises(EngineLost, match="cancelled"):
            await asyncio.wait_for(submitting, 60)
        held.set()
        assert [len(ids) for ids in await asyncio.gather(*before)] == [20, 20]
        assert waiting.id not in begun
        assert not any(session.tasks for session in server._sessions.values())


async def test_a_replica_that_drains_says_so_and_waits_for_its_tasks(server: EngineServer) -> None:
    async with Gateway(server) as gateway:
        running = asyncio.create_task(gateway.tokens(task(120)))
        await until(lambda: server.engine.host.stats().generated_tokens)
        draining = asyncio.create_task(server.drain(30))
        await until(lambda: gateway.lost)
        assert gateway.client.draining
        with pytest.raises(EngineLost) as refused:
            await gateway.tokens(task())
        assert not refused.value.accepted
        assert len(await running) == 120
        await draining
        with pytest.raises(EngineLost):
            await gateway.client.call("stats")


def test_a_task_arrives_as_it_was_sent() -> None:
    options = SamplingParams(
        seed=2**64 - 1, temperature=0.7, logit_bias={3: -1.5}, stop=("a", "b"), early_stopping="never", n=2
    )
    resume = Resumption(received=(PartialCompletion(index=1, token_ids=(1, 2), finished=True),), computed_on="here")
    structured = SamplingParams(structured_output=StructuredOutput(regex="a+"))
    for params in (options, structured, ScoringParams(top_logprobs=3)):
        sent = TextTask(
            prompt=Prompt(token_ids=(1, 2, 3)), params=params, timeout=1.5, tenant="ann", adapter="a", resume=resume
        )
        method, received = messages.decode_call(messages.encode_call("submit", sent))
        assert (method, received) == ("submit", (sent,))


@pytest.mark.parametrize(
    "error",
    [
        InvalidValue.of("seed", -1, "0 or more"),
        LayerFailed.of("blocks.1", "mha", "raised"),
        NoTokenError("no token"),
        EngineLost("gone"),
        Unavailable("busy", retry_seconds=2),
    ],
)
def test_an_error_arrives_as_it_was_raised(error: AttnError) -> None:
    with pytest.raises(type(error)) as raised:
        messages.decode_answer("stats", messages.encode_answer(error))
    assert type(raised.value) is type(error)
    assert (raised.value.message, raised.value.metadata) == (error.message, error.metadata)


def test_an_error_of_a_class_that_is_not_known_here_is_one_above_it() -> None:
    assert type(error_of_reasons(["NEWER", "INVALID_VALUE", "INVALID_ARGUMENT"], "x", {})) is InvalidValue
    assert type(error_of_reasons(["NEWER"], "x", {})) is InternalError


async def test_with_tls_both_sides_prove_who_they_are_and_the_secret_is_asked_for_as_well(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_client, "OPEN_SECONDS", 5.0)
    ours, others = signed(tmp_path / "ours", messages.TLS_NAME), signed(tmp_path / "others", messages.TLS_NAME)
    elsewhere = signed(tmp_path / "elsewhere", "replica.example.org")
    config = EngineConfig(num_threads=1)
    server = EngineServer(home / "models" / "tiny", config, tls=ours)
    await server.start("127.0.0.1")
    try:
        async with Gateway(server, tls=ours) as gateway:
            assert len(await gateway.tokens(task(tokens=4))) == 4
        strangers = [others, None, replace(others, authority=ours.authority), replace(ours, authority=others.authority)]
        for stranger in strangers:
            with pytest.raises(EngineLost):
                await Gateway(server, tls=stranger).client.connect()
        with pytest.raises(EngineLost):
            await Gateway(server, tls=ours, secret="guessed").client.connect()
    finally:
        await server.drain(0)
    posing = EngineServer(home / "models" / "tiny", config, tls=elsewhere)
    await posing.start("127.0.0.1")
    try:
        with pytest.raises(EngineLost):
            await Gateway(posing, tls=elsewhere).client.connect()
    finally:
        await posing.drain(0)


def test_files_of_tls_that_are_missing_are_named_before_anything_starts(tmp_path: Path) -> None:
    files = signed(tmp_path / "ours", messages.TLS_NAME)
    given = {"replica_tls_cert": files.certificate, "replica_tls_key": files.key, "replica_tls_ca": files.authority}
    assert replica_tls_of(ServerConfig(**given)) == files
    assert replica_tls_of(ServerConfig()) is None
    for name in given:
        with pytest.raises(InvalidValue, match="replica-tls-cert"):
            ServerConfig(**{other: path for other, path in given.items() if other != name})
        with pytest.raises(InvalidValue, match=name):
            replica_tls_of(ServerConfig(**given | {name: tmp_path / "nowhere"}))
