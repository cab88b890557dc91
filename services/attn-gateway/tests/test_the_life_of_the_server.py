"""Health, reflection, start, drain and the settings of the gateway."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_core.errors import InternalError, InvalidValue, MissingPackage, UserError
from attn_gateway import Gateway, GatewaySettings, TlsFiles, read_tenants, serving
from attn_gateway.cluster import ClusterSettings, ModelToLoad
from attn_gateway.serve import ServeSettings, serve
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

NAME = "attn.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_every_service_and_the_server_say_that_they_serve(channel: grpc.aio.Channel) -> None:
    assert await health(channel, "") == SERVING
    assert await health(channel, NAME) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(channel, "attn.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_model_that_no_installed_service_can_load_is_an_error_not_an_empty_server(tmp_path: Path) -> None:
    cluster = ClusterSettings(home=tmp_path, models=(ModelToLoad.parse("mine=./folder"),))
    with pytest.raises(MissingPackage, match="attn-serve"):
        await serve(ServeSettings(gateway=GatewaySettings(port=0), cluster=cluster), print, lambda _: [])


async def test_a_service_that_cancels_its_start_ends_the_server_with_an_error(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(words, "start", cancelled)
    settings = ServeSettings(gateway=GatewaySettings(port=0), cluster=ClusterSettings(home=tmp_path))
    with pytest.raises(InternalError, match="cancelled"):
        await serve(settings, lambda _: pytest.fail("it does not serve"), lambda _: [words])


async def test_health_needs_no_token_for_probes_have_none(words: Any) -> None:
    settings = GatewaySettings(port=0, token="right")
    async with serving([words], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        assert await health(channel, NAME) == SERVING


async def test_reflection_describes_the_services(gateway: Gateway) -> None:
    def ask() -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(gateway.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName(NAME)
            return list(database.get_services()), [method.name for method in service.methods]

    services, methods = await asyncio.to_thread(ask)
    assert NAME in services
    assert "grpc.health.v1.Health" in services
    assert methods == ["Generate", "Score", "Embed", "Tokenize", "AttentionMaps", "GetEngineStats"]


async def test_while_a_service_starts_the_door_says_so(words: Any) -> None:
    words.let_start.clear()
    gateway = Gateway(GatewaySettings(port=0), [words])
    starting = asyncio.create_task(gateway.start())
    await words.asked_to_start.wait()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        assert await health(channel, NAME) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceServiceStub(channel).Tokenize(words.tokenize())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "still starting" in caught.value.details()
        words.let_start.set()
        await starting
        assert await health(channel, NAME) == SERVING
        assert len((await InferenceServiceStub(channel).Tokenize(words.tokenize())).tokens) == 3
    await gateway.stop(1)


async def test_stopping_lets_running_calls_end(words: Any) -> None:
    gateway = Gateway(GatewaySettings(port=0), [words])
    await gateway.start()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        call = InferenceServiceStub(channel).Generate(words.generate(" ".join("abcdefghij" * 3)))
        received = aiter(call)
        first = await anext(received)
        stopping = asyncio.create_task(gateway.stop(10))
        rest = [message.text async for message in received]
        assert first.text + "".join(rest) == "abcdefghij" * 3
        await stopping
    assert words.stopped_with == 10


async def test_stopping_cuts_what_outlives_the_shutdown_timeout(words: Any) -> None:
    gateway = Gateway(GatewaySettings(port=0), [words])
    await gateway.start()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        call = InferenceServiceStub(channel).Generate(words.generate("a " * 10_000))
        received = aiter(call)
        await anext(received)
        await asyncio.wait_for(gateway.stop(0.2), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in received:
                pass
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await asyncio.wait_for(words.freed.wait(), timeout=60)


async def test_a_health_watch_does_not_hold_the_server_open(words: Any) -> None:
    gateway = Gateway(GatewaySettings(port=0), [words])
    await gateway.start()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        await asyncio.wait_for(gateway.stop(600), timeout=60)


async def test_the_port_is_free_again_after_the_server(words: Any) -> None:
    async with serving([words]) as gateway:
        port = int(gateway.address.rpartition(":")[2])
    async with serving([words], GatewaySettings(port=port)):
        pass


async def test_a_port_in_use_is_named(words: Any, tmp_path: Path) -> None:
    async with serving([words]) as gateway:
        port = int(gateway.address.rpartition(":")[2])
        for taken in (GatewaySettings(port=port), GatewaySettings(port=0, http_port=port)):
            settings = ServeSettings(gateway=taken, cluster=ClusterSettings(home=tmp_path))
            with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
                await serve(settings, print, lambda _: pytest.fail("it starts services before it looks"))
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
            async with serving([words], GatewaySettings(port=port)):
                pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}"):
            async with serving([words], GatewaySettings(port=port)):
                pass


async def test_a_host_that_is_not_ours_is_named(words: Any) -> None:
    settings = GatewaySettings(host="203.0.113.7", port=0, insecure=True)
    with pytest.raises(UserError, match=r"203\.0\.113\.7"):
        async with serving([words], settings):
            pass


async def test_a_key_that_does_not_fit_the_certificate_is_refused(
    words: Any, certificate: TlsFiles, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no key")
    files = TlsFiles(certificate=certificate.certificate, key=wrong)
    with pytest.raises(UserError, match="key"):
        async with serving([words], GatewaySettings(port=0, tls=files)):
            pass


async def test_an_error_of_a_starting_service_is_raised_as_it_is_and_the_port_is_given_back() -> None:
    class Broken:
        names = ("attn.v1.Broken",)
        stopped = False

        def handlers(self) -> Any:
            return {}

        async def start(self) -> None:
            raise UserError("no such model")

        async def stop(self, shutdown_timeout: float) -> None:
            self.stopped = True

    broken = Broken()
    with pytest.raises(UserError, match="no such model"):
        async with serving([broken]):
            pass
    assert broken.stopped


def test_two_services_of_one_name_are_refused(words: Any) -> None:
    with pytest.raises(UserError, match=NAME):
        Gateway(GatewaySettings(port=0), [words, words])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org"])  # noqa: S104
def test_a_door_open_to_strangers_needs_token_and_tls(host: str, certificate: TlsFiles) -> None:
    for lacking in ({}, {"token": "t"}, {"tls": certificate}):
        with pytest.raises(InvalidValue, match="--insecure"):
            GatewaySettings(host=host, **lacking)
    assert GatewaySettings(host=host, token="t", tls=certificate).host == host
    assert GatewaySettings(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_neither(host: str) -> None:
    assert GatewaySettings(host=host).host == host


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("port", 65536), ("token", ""), ("token", "a\nb"), ("token", "ü"), ("max_calls", 0)],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=field):
        GatewaySettings(**{field: value})


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_tenants(path)
    path.chmod(0o600)
    assert list(read_tenants(path)) == ["s3cret"]
    path.write_text(" \n")
    with pytest.raises(UserError, match="empty"):
        read_tenants(path)
    with pytest.raises(UserError, match="missing"):
        read_tenants(tmp_path / "missing")
