"""The gateway: a `grpc.aio` server in front of services."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog
from attn_core.errors import InternalError, InvalidValue, Unavailable, UserError, cleaning_up
from attn_schema.methods import Row
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from attn_gateway.call import Metadata
from attn_gateway.calls import Calls, Handler
from attn_gateway.grpc_edge import GrpcEdge
from attn_gateway.health import Health
from attn_gateway.metrics import Metrics
from attn_gateway.policies.auth import BearerToken, audit
from attn_gateway.policies.limits import Limits, Readiness
from attn_gateway.policies.measure import Measured, errors_shown
from attn_gateway.service import HttpServer, KnowsItsAddress, Service
from attn_gateway.settings import GatewaySettings
from attn_gateway.traces import Traces

log = structlog.get_logger()

TOKEN_FILE_SECONDS = 1.0
"""Interval at which the token file is checked for changes."""
HANDSHAKE_SECONDS = 10
"""How long a client may take for the handshakes of TLS and HTTP/2."""
MOST_STREAMS = 2**16
"""Most concurrent streams of a connection that gRPC itself accepts; `policies.limits` has the real limit."""


class Gateway:
    """A gRPC server, with an optional HTTP server in front of the same services; runs from `start` to `stop`."""

    def __init__(self, settings: GatewaySettings, services: Sequence[Service], http: HttpServer | None = None) -> None:
        self.settings = settings
        self.http = http
        self.services = tuple(services)
        for name in set(self.names):
            if self.names.count(name) > 1:
                raise UserError(
                    f"two plugins offer the service {name}; name the ones to use in ATTN_PLUGINS", name=name
                )
        self._health = Health(self.services)
        self._readiness = Readiness()
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._calls: Calls | None = None
        self.tenants = settings.tenants()
        self._watching: asyncio.Task[None] | None = None
        self._own_calls: Calls | None = None
        self._metrics = Metrics()
        endpoint = settings.otlp_traces_endpoint
        self._traces = None if endpoint is None else Traces(endpoint)
        self._token = BearerToken(self.tenants)
        self._serving = False

    @property
    def calls(self) -> Calls:
        """The calls of all services, for other edges than gRPC; raises `Unavailable` before `start`."""
        if self._calls is None:
            raise Unavailable("the server is still starting")
        return self._calls

    def require_token(self, metadata: Metadata) -> None:
        """Raise `Unauthenticated` if callers need a token and this metadata has no valid one."""
        self._token.caller(metadata)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request, by the path of its route and its status."""
        self._metrics.count("attn_http_requests", (path, str(status)))

    async def metrics(self, metadata: Metadata) -> bytes:
        """The metrics of all tenants in Prometheus's text format.

        If callers need a token, raises `Unauthenticated` without a valid one, and `PermissionDenied` unless it is an
        admin's.
        """
        self._token.caller(metadata).require_admin("reading metrics")
        return await self._metrics.text(self._own_calls if self._serving else None)

    @property
    def serving(self) -> bool:
        """Whether all services are ready."""
        return self._serving

    @property
    def names(self) -> list[str]:
        """The full names of all services."""
        return [name for service in self.services for name in service.names]

    @property
    def address(self) -> str:
        """The `host:port` to which clients connect; the port is known once `start` listens."""
        host = self.settings.host
        return f"[{host}]:{self._port}" if ":" in host and not host.startswith("[") else f"{host}:{self._port}"

    async def start(self) -> None:
        """Listen, then start the services concurrently; returns when all are ready.

        Raises `UserError` if the port is not available, or the first error of a service. Call `stop` in any case.
        """
        self._server = server = self._build()
        self._port = _bind(server, self.settings)
        for name in ("", *self.names):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        for service in self.services:
            if isinstance(service, KnowsItsAddress):
                service.listens(self.address, chosen=self.settings.port != 0)
        await server.start()
        self._watching = asyncio.create_task(self._watch_tokens())
        if self.http is not None:
            await self.http.start(self)
        await _all(self._open(service) for service in self.services)
        self._serving = True
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new calls, let running ones finish for `shutdown_timeout` seconds, then cancel them.

        Stops the services and the HTTP server meanwhile.
        """
        self._serving = False
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        self._readiness.close()
        stops = [service.stop(shutdown_timeout) for service in self.services]
        stops += [] if self.http is None else [self.http.stop(shutdown_timeout)]
        results = await asyncio.gather(self._drain(shutdown_timeout), *stops, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                log.error("stop failed", exc_info=error)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.stop)

    async def _watch_tokens(self) -> None:
        """Read the token file again whenever it changes."""
        while True:
            await asyncio.sleep(TOKEN_FILE_SECONDS)
            self.tenants.reload_if_changed()

    async def _drain(self, shutdown_timeout: float) -> None:
        if self._server is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._readiness.idle(), timeout=shutdown_timeout)
        # The calls that still run have had their time; with a longer grace, health watches would delay the stop.
        await self._server.stop(grace=0.1)

    async def _open(self, service: Service) -> None:
        try:
            await service.start()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The task group would ignore the cancellation, and the service would count as started.
            raise InternalError(f"{', '.join(service.names)}: the service cancelled its own start") from error
        for name in service.names:
            self._readiness.open(name)
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _build(self) -> grpc.aio.Server:
        settings, tenants = self.settings, self.tenants
        limits = Limits(tenants, settings.max_calls, settings.max_streams_per_connection)
        measured = Measured(self._metrics, self._traces, by_tenant=bool(tenants))
        handlers: dict[Row, Handler] = {}
        for service in self.services:
            handlers |= service.handlers()
        # The first policy is the outermost: any error of an inner one is shown with its request id, and measured.
        self._calls = Calls(handlers, (errors_shown, measured, self._token, limits, self._readiness, audit))
        self._own_calls = Calls(handlers)
        server = grpc.aio.server(options=server_options(settings))
        server.add_generic_rpc_handlers((GrpcEdge(self._calls, self._token),))  # the first of all: it checks tokens
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        shown = [*self.names, HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(shown, server)
        return server


@contextlib.asynccontextmanager
async def serving(
    services: Sequence[Service],
    settings: GatewaySettings | None = None,
    *,
    http: HttpServer | None = None,
    shutdown_timeout: float = 1.0,
) -> AsyncIterator[Gateway]:
    """Run a gateway inside the `async with` block; by default on a free port of the loopback interface."""
    gateway = Gateway(settings or GatewaySettings(port=0), services, http)
    try:
        await gateway.start()
        yield gateway
    finally:
        with cleaning_up("the gateway"):
            await gateway.stop(shutdown_timeout)


def server_options(settings: GatewaySettings) -> list[tuple[str, int]]:
    """The channel arguments of the server."""
    return [
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_allowed_incoming_connections", settings.connections_allowed),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # Above this limit, gRPC resets streams without a message, so it is high; see `policies.limits`.
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Otherwise clients that ping during a long call without data would be disconnected.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # With SO_REUSEPORT, two servers on one port would silently share its connections.
        ("grpc.so_reuseport", 0),
    ]


def _bind(server: grpc.aio.Server, settings: GatewaySettings) -> int:
    probe(settings.host, settings.port)
    target = settings.host.strip("[]")
    address = f"[{target}]:{settings.port}" if ":" in target else f"{target}:{settings.port}"
    try:
        if settings.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, grpc.ssl_server_credentials([settings.tls.read()]))
    except RuntimeError as error:
        raise UserError(f"cannot listen on {address}; with TLS, check that the key matches the certificate") from error


def probe(host: str, port: int, field: str = "port") -> None:
    """Raise a `UserError` with the reason if an address cannot be listened on; gRPC does not give the reason."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop what listens there, or choose another port (0 picks one)"
            raise UserError(message, field=field, given=port) from error
        raise InvalidValue(f"cannot listen on {host}, port {port}: {error.strerror}", field="host") from error


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised, not as an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
