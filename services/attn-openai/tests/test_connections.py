"""What clients can do to each other by connections alone: idle, slow, without a token, more than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from attn_gateway import GatewaySettings, TlsFiles, serving
from attn_openai import app, connections
from attn_openai.connections import network_of
from attn_openai.server import UvicornServer

IDLE = 2000
ADDRESSES = 4
"""Idle connections come from this many addresses of the loopback network; on other systems than Linux from one."""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[UvicornServer]:
    """The HTTP server of a gateway without services."""
    server = UvicornServer()
    async with serving([], GatewaySettings(port=0, http_port=0, **settings), http=server):
        yield server


async def opened(server: UvicornServer, source: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port), local_addr=source and (source, 0))


async def answered(server: UvicornServer, sent: bytes) -> bytes:
    """All that the server sends until it closes, after it was sent something that is not a whole request."""
    reader, writer = await opened(server)
    writer.write(sent)
    async with asyncio.timeout(10):
        found = await reader.read()
    writer.close()
    return found


@pytest.fixture
def descriptors() -> Iterator[int]:
    """How many idle connections this process can hold both ends of: 2,000, or fewer if it may not open the files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 3 * IDLE + 1000
    allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, before), most))
    yield min(IDLE, (max(allowed, before) - 1000) // 3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize("limits", [{}, {"max_connections": 100, "max_connections_per_address": 20}], ids=str)
async def test_a_client_is_served_while_idle_connections_stand(descriptors: int, limits: dict[str, int]) -> None:
    """Without limits that they reach they all stand; else they make room, one at a time, for whoever comes."""
    async with listening(**limits) as server, contextlib.AsyncExitStack() as idle:
        sources = [f"127.0.0.{place + 2}" for place in range(ADDRESSES)] if sys.platform == "linux" else [None]
        standing = []
        for place in range(descriptors):
            reader, writer = await opened(server, sources[place % len(sources)])
            idle.callback(writer.close)
            standing.append(reader)
        async with httpx2.AsyncClient(base_url=f"http://{server.address}", timeout=5) as http:
            assert (await http.get("/version")).status_code == 200
        async with httpx2.AsyncClient(
            base_url=f"http://{server.address}",
            timeout=5,
            transport=httpx2.AsyncHTTPTransport(local_address=sources[0]),
        ) as neighbour:
            assert (await neighbour.get("/version")).status_code == 200
        left = sum(not reader.at_eof() for reader in standing)
        if limits:
            assert left < limits["max_connections"]
        elif len(sources) > 1:
            assert left == descriptors


async def test_a_connection_beyond_those_that_work_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 3.0)
    async with listening(max_connections=2, max_connections_per_address=2) as server:
        working = [await opened(server) for _ in range(2)]
        for _, writer in working:
            writer.write(HEAD + b"content-length: 5\r\n\r\n{")
        await asyncio.sleep(0.2)
        refused = await answered(server, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1" in refused
        for _, writer in working:
            writer.close()
        await asyncio.sleep(0.2)
        async with httpx2.AsyncClient(base_url=f"http://{server.address}") as http:
            assert (await http.get("/version")).status_code == 200


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"content-length: 5\r\n\r\n{", b"GET /version HTTP/1.1\r\n"])
async def test_a_slow_request_ends_with_408(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    async with listening() as server:
        answer = await answered(server, sent)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nretry-after: " in answer
        assert await answered(server, b"") == b""


@pytest.mark.parametrize(
    "start",
    [
        b"GET /version HTTP/1.1\r\nx: ",
        b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\nGET /version HTTP/1.1\r\nx: ",
        HEAD + b"content-length: 9000\r\n\r\n",
    ],
    ids=["head", "second head", "body without token"],
)
async def test_dripping_bytes_gain_no_time(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    async with listening(token="one") as server:
        reader, writer = await opened(server)
        reading = asyncio.ensure_future(reader.read())
        writer.write(start)
        for _ in range(100):
            if reading.done():
                break
            writer.write(b"x")
            await asyncio.sleep(0.05)
        assert reading.done()
        await asyncio.gather(reading, return_exceptions=True)  # a reset, if bytes were still under way
        writer.close()


async def test_the_time_for_a_head_includes_the_handshake_of_tls(
    monkeypatch: pytest.MonkeyPatch, certificate: TlsFiles
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    async with listening(tls=certificate) as server:
        assert await answered(server, b"") == b""
        assert await answered(server, b"\x16\x03") == b""


async def test_a_token_is_asked_for_before_a_body_is_read() -> None:
    async with listening(token="one") as server:
        reader, writer = await opened(server)
        writer.write(HEAD + b"content-length: 4000000\r\n\r\n{")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_a_response_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.3)
    async with listening() as server:
        _, writer = await opened(server)
        writer.transport.pause_reading()
        for _ in range(1000):
            if writer.transport.is_closing():
                break
            writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
            await asyncio.sleep(0.02)
        assert writer.transport.is_closing()  # by a reset


def test_addresses_are_counted_by_whom_they_belong_to() -> None:
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1%eth0") != network_of("2001:db8:0:1::1")
