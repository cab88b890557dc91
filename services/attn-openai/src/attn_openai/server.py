"""The HTTP server of a gateway: uvicorn in the gateway's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvicorn
from attn_core.errors import UserError
from attn_gateway import GatewaySettings, ServingState, probe
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from attn_openai.app import HttpApplication
from attn_openai.connections import Connections, LimitedProtocol

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than the minute for which proxies and clients keep theirs."""
BACKLOG = 256
"""Most connections that are accepted at once: descriptors that are taken before any limit is looked at."""


class _Server(uvicorn.Server):
    """A uvicorn server with an event for when it listens, and no signal handlers: the gateway handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class UvicornServer:
    """An `attn_gateway.HttpServer` that listens at `http_port` of the gateway's settings."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._host = ""

    @property
    def address(self) -> str:
        """The `host:port` to which clients connect."""
        port = self._socket.getsockname()[1] if self._socket is not None else 0
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def start(self, gateway: ServingState) -> None:
        """Listen and serve; raises `UserError` if the port is not available or the TLS files cannot be used."""
        settings = gateway.settings
        self._host = settings.host.strip("[]")
        config = _config(settings, HttpApplication(gateway).app)
        self._limit(config, settings)
        self._socket = listening(self._host, settings.http_port or 0)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        await self._server.listens.wait()

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new connections, let requests finish for `shutdown_timeout` seconds, then cancel them."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(shutdown_timeout))
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=shutdown_timeout + 1)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._socket is not None:
            self._socket.close()

    @staticmethod
    def _limit(config: uvicorn.Config, settings: GatewaySettings) -> None:
        """Let connections, and their TLS, be handled by `LimitedProtocol`."""
        most = settings.connections_allowed
        connections = Connections(most, min(settings.max_connections_per_address, most))
        protocol = partial(LimitedProtocol, connections, config.ssl)
        config.http_protocol_class = cast("type[asyncio.Protocol]", protocol)
        config.ssl = None


def _config(settings: GatewaySettings, app: Starlette) -> uvicorn.Config:
    """The uvicorn config for an application; raises `UserError` for a certificate or key that cannot be used."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        http=H11Protocol,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=BACKLOG,
        ssl_certfile=settings.tls.certificate if settings.tls else None,
        ssl_keyfile=settings.tls.key if settings.tls else None,
    )
    try:
        config.load()
    except OSError as error:
        raise UserError(f"tls_cert, tls_key: not usable for HTTP: {error.strerror or error}") from error
    return config


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on a port of one host address; raises `UserError` if the port is not available."""
    probe(host, port, field="http_port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; otherwise small answers would wait 40 ms for an ACK.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise UserError(f"port {port} on {host}: {error.strerror}", field="http_port", given=port) from error
    opened.listen(BACKLOG)
    return opened
