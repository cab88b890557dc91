"""Whom a token stands for, what it may, how much, and that a file of tokens may change meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from attn.v1 import model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core.errors import InvalidValue, OutOfCapacity, UserError
from attn_gateway import GatewaySettings, Tenant, Tenants, handlers_of, read_tenants, serving
from attn_gateway.policies.limits import Bucket, Connections, TenantUse
from attn_schema.methods import MODELS, ListModelsResponse, UnloadModelResponse
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def retry_seconds(failure: grpc.aio.AioRpcError) -> float:
    details = dict(failure.trailing_metadata())["grpc-status-details-bin"]
    info = RetryInfo()
    assert any(detail.Unpack(info) for detail in Status.FromString(details).details)
    return info.retry_delay.ToNanoseconds() / 1e9


def test_a_file_says_of_each_token_whose_it_is_and_what_it_may(tmp_path: Path) -> None:
    file = written(
        tmp_path / "tokens",
        "op\n\n one tenant=ann weight=2.5 max_running=4 \ntwo tenant=ann\nthree 3\nfour role=admin tenant=eve\n",
    )
    found = read_tenants(file)
    ann = Tenant(name="ann", weight=2.5, max_running=4)
    assert (found["one"], found["two"]) == (ann, ann)
    assert [found[token].role for token in ("op", "one", "three", "four")] == ["admin", "user", "user", "admin"]
    assert found["three"].weight == 3
    assert len({tenant.name for tenant in found.values()}) == 4


@pytest.mark.parametrize(
    "bad",
    [
        "secret two", "secret 0", "secret -1", "secret nan", "secret weight=inf", "secret 1 2", "secret role=root",
        "secret tenant=a/b", "secret tenant=", "secret tenant=a tenant=b", "secret speed=3", "secret max_running=1.5",
        "secret tenant=ann weight=2\nother tenant=ann weight=3", "secret tenant=a\nsecret tenant=b", "sécret",
        "secret tenant=" + "x" * 65,
    ],
)  # fmt: skip
def test_what_a_file_cannot_mean_is_refused_by_line_and_without_the_token(tmp_path: Path, bad: str) -> None:
    file = written(tmp_path / "tokens", f"first\n{bad}\n")
    with pytest.raises(UserError, match=r"line [23]") as said:
        read_tenants(file)
    assert "secret" not in str(said.value)
    assert said.value.metadata["field"] == "token_file"


def test_tokens_come_from_a_file_or_are_given_not_both(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="other_tokens"):
        GatewaySettings(other_tokens=("bob",))
    with pytest.raises(InvalidValue, match="token_file"):
        GatewaySettings(token="a", token_file=tmp_path / "tokens")
    with pytest.raises(InvalidValue, match="missing"):
        GatewaySettings(token_file=tmp_path / "missing").tenants()


async def test_a_token_is_taken_and_another_dropped_while_the_server_runs(words: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "tokens", "old tenant=ann\n")
    settings = GatewaySettings(port=0, token_file=file)
    async with serving([words], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        stub = InferenceServiceStub(channel)
        await stub.Tokenize(words.tokenize(), metadata=bearer("old"))
        stream = stub.Generate(words.generate(" ".join("abcdefgh")), metadata=bearer("old"))
        texts = aiter(stream)
        assert (await anext(texts)).text == "a"
        half = written(tmp_path / "half", "new tenant=ann\n")
        half.replace(file)
        for _ in range(60):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Tokenize(words.tokenize(), metadata=bearer("new"))
                break
            await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError, match="authorization"):
            await stub.Tokenize(words.tokenize(), metadata=bearer("old"))
        assert words.calls[0].tenant == words.calls[-1].tenant == "ann"
        assert [message.text async for message in texts] == list("bcdefgh")
        written(file, "broken role=king\n")
        assert gateway.tenants.reload() is False
        await stub.Tokenize(words.tokenize(), metadata=bearer("new"))


async def test_the_limits_of_a_tenant_hold_and_are_told_with_a_time_to_retry(words: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "tokens", "op\none tenant=ann max_running=2 requests_per_minute=30\ntwo tenant=bob\n")
    settings = GatewaySettings(port=0, token_file=file)
    async with serving([words], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        stub = InferenceServiceStub(channel)

        async def ask(token: str) -> Any:
            try:
                return [m.text async for m in stub.Generate(words.generate("a b c d"), metadata=bearer(token))]
            except grpc.aio.AioRpcError as failure:
                return failure

        results = await asyncio.gather(*(ask("one") for _ in range(5)), *(ask("two") for _ in range(5)))
        assert [result == list("abcd") for result in results].count(True) == 7
        for failure in (result for result in results if not isinstance(result, list)):
            assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_running=2" in failure.details()
            assert retry_seconds(failure) > 0
        late = [await ask("one") for _ in range(6)]
        assert late[-1].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "requests_per_minute=30" in late[-1].details()
        assert 0 < retry_seconds(late[-1]) <= 2


def test_tokens_beyond_the_rate_must_be_waited_for() -> None:
    now = 0.0
    use = TenantUse(Tenant(name="ann", tokens_per_minute=600), lambda: now)
    use.begin()
    use.spend(400)
    with pytest.raises(OutOfCapacity, match="tokens_per_minute=600") as caught:
        use.begin()
    wait = float(caught.value.metadata["retry_seconds"])
    assert wait == pytest.approx(30.1, abs=0.01)
    now = wait + 0.01
    use.begin()


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=60), st.floats(1, 1000))
def test_no_pattern_of_calls_gets_more_than_the_rate_and_one_burst(steps, rate) -> None:
    now = 0.0
    bucket = Bucket(rate, 1.0, lambda: now)
    taken = 0
    for pause, wanted in steps:
        now += pause
        for _ in range(wanted):
            if bucket.wait(1.0) == 0:
                bucket.take(1.0)
                taken += 1
    assert taken <= rate / 60 * (now + 10) + 1 + 1e-6


async def test_more_streams_than_a_connection_may_have_wait_their_turn_and_none_is_reset(words: Any) -> None:
    settings = GatewaySettings(port=0, max_streams_per_connection=32)
    async with serving([words], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        stub = InferenceServiceStub(channel)

        async def ask() -> str:
            try:
                return "".join([message.text async for message in stub.Generate(words.generate("a b"))])
            except grpc.aio.AioRpcError as failure:
                told = "of this connection" in failure.details() and retry_seconds(failure) > 0
                return f"{failure.code().name} {told}"

        few = Counter(await asyncio.gather(*(ask() for _ in range(160))))
        assert few == {"ab": 160}
        many = Counter(await asyncio.gather(*(ask() for _ in range(400))))
        assert set(many) <= {"ab", "RESOURCE_EXHAUSTED True"}
        assert many["ab"] >= 160


async def test_a_turn_that_was_given_up_goes_to_the_next() -> None:
    connections = Connections(1)
    await connections.enter("peer")
    waiting = [asyncio.ensure_future(connections.enter("peer")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    connections.leave("peer")
    await asyncio.wait_for(waiting[1], 60)
    waiting[2].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    connections.leave("peer")
    assert not connections._running
    assert not connections._waiting


async def test_a_call_does_not_wait_for_its_connection_until_its_deadline_is_near() -> None:
    now = 0.0
    connections = Connections(10, lambda: now)
    for _ in range(10):
        await connections.enter("peer")
    waiting = [asyncio.ensure_future(connections.enter("peer")) for _ in range(30)]
    await asyncio.sleep(0)
    for _ in range(20):  # one ends every half second, so that the last of the others waits for five
        now += 0.5
        connections.leave("peer")
    with pytest.raises(OutOfCapacity) as caught:
        await asyncio.wait_for(connections.enter("peer", 10.0), 5)
    assert 0 < float(caught.value.metadata["retry_seconds"]) < 10
    patient = [asyncio.ensure_future(connections.enter("peer", given)) for given in (60.0, None)]
    for _ in range(12):
        await asyncio.sleep(0)
        connections.leave("peer")
    await asyncio.wait_for(asyncio.gather(*waiting, *patient), 5)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 200_000, "é" * 5000, "\n" * 3000])
async def test_a_name_too_long_to_be_quoted_is_answered_in_words(words: Any, name: str) -> None:
    async def refuse(request: Any, _: Any) -> Any:
        raise UserError(f"unknown model {request.model!r}", name=request.model, field=request.model)

    words.answer = refuse
    async with serving([words]) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceServiceStub(channel).Tokenize(words.tokenize(model=name))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("unknown model")
    assert "grpc-status-details-bin" in dict(caught.value.trailing_metadata())


class Models:
    """Models that can be unloaded by admins alone."""

    names = (MODELS,)

    def handlers(self) -> Any:
        return handlers_of(MODELS, self)

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self, shutdown_timeout: float) -> None:
        """Nothing to free."""

    def model_serves(self, name: str) -> bool | None:
        return {"up": True, "down": False}.get(name)

    async def unload_model(self, request: Any, call: Any) -> UnloadModelResponse:
        call.caller.require_admin("unloading models")
        return UnloadModelResponse()

    async def list_models(self, *_: Any) -> ListModelsResponse:
        return ListModelsResponse()


@contextlib.contextmanager
def logged() -> Iterator[list[Any]]:
    """The lines that are logged meanwhile; capturing them configures the log, which stays so otherwise."""
    try:
        with structlog.testing.capture_logs() as lines:
            yield lines
    finally:
        structlog.reset_defaults()


async def test_each_change_leaves_one_line_of_who_did_what_and_reading_leaves_none() -> None:
    settings = GatewaySettings(port=0, token="op", other_tokens=("one",))
    with logged() as lines:
        async with serving([Models()], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
            stub = ModelServiceStub(channel)
            await stub.ListModels(model_pb2.ListModelsRequest(), metadata=bearer("op"))
            await stub.UnloadModel(model_pb2.UnloadModelRequest(name="m"), metadata=bearer("op"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.UnloadModel(model_pb2.UnloadModelRequest(name="m\nx"), metadata=bearer("one"))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    audit = [line for line in lines if line["event"] == "audit"]
    assert [(line["action"], line["result"], line["role"], line["name"]) for line in audit] == [
        ("UnloadModel", "OK", "admin", "m"),
        ("UnloadModel", "PERMISSION_DENIED", "user", "m\nx"),
    ]
    assert all(line["tenant"] and line["peer"] and line["call"] for line in audit)
    assert "op" not in {line["tenant"] for line in audit}


async def test_each_model_has_a_health_of_its_own() -> None:
    async with serving([Models()]) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def check(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

        assert await check("attn.v1.ModelService") == health_pb2.HealthCheckResponse.SERVING
        assert await check("attn.v1.ModelService/up") == health_pb2.HealthCheckResponse.SERVING
        assert await check("attn.v1.ModelService/down") == health_pb2.HealthCheckResponse.NOT_SERVING
        for unknown in ("attn.v1.ModelService/other", "nothing/up", "nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(unknown)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="attn.v1.ModelService/down"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


def test_tenants_are_told_apart_by_the_whole_token() -> None:
    tenants = Tenants.of_tokens(["right", "fine"])
    assert tenants.of(["Bearer right"]).is_admin
    assert not tenants.of(["Bearer fine"]).is_admin
    for wrong in ([], ["Bearer righ"], ["Bearer right "], ["right"], ["Bearer right", "Bearer fine"]):
        assert tenants.of(wrong) is None
