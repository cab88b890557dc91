"""What a gRPC service and an HTTP server are to the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import grpc.aio

if TYPE_CHECKING:
    from attn_gateway.cluster import ModelToLoad
    from attn_gateway.local_calls import LocalCalls, Metadata
    from attn_gateway.settings import GatewaySettings


@runtime_checkable
class GrpcService(Protocol):
    """A service of the gateway. Its life: `add_to`, `start`, calls, `stop`; each happens once.

    Calls reach it only between the end of `start` and the beginning of `stop`: before and after, the gateway
    answers UNAVAILABLE and its health is NOT_SERVING.
    """

    @property
    def names(self) -> Sequence[str]:
        """Full names of the gRPC services, such as "attn.v1.CatalogService"; for health and reflection."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicers, whose handlers are `async def`, to a server that has not started."""
        ...

    async def start(self) -> None:
        """Get ready to answer: start engines, load models. An error ends the whole server."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Free everything; returns within about `shutdown_timeout` seconds.

        Begins while the last calls still run: short ones may finish, long streams should end now. Called also when
        `start` failed or was cancelled, so it must cope with what was never made.
        """
        ...


class ServingState(Protocol):
    """What an HTTP server may ask of the gateway it answers for."""

    @property
    def settings(self) -> GatewaySettings:
        """Where to listen and whom to let in."""
        ...

    @property
    def local_calls(self) -> LocalCalls:
        """The services, to be called without a wire."""
        ...

    @property
    def serving(self) -> bool:
        """Whether all services are ready."""
        ...

    async def metrics(self, metadata: Metadata) -> bytes:
        """What Prometheus is told; raises `Unauthenticated`."""
        ...


@runtime_checkable
class HttpServer(Protocol):
    """Answers HTTP in front of the services of a gateway. Its life: `start`, requests, `stop`; each happens once."""

    @property
    def address(self) -> str:
        """`host:port` as clients dial it, from the end of `start`."""
        ...

    async def start(self, gateway: ServingState) -> None:
        """Listen, while services may still start; raises `UserError` if the port cannot be had."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new requests and end the others within about `shutdown_timeout` seconds; also if `start` failed."""
        ...


@runtime_checkable
class KnowsItsAddress(Protocol):
    """A service that tells others where its gateway listens."""

    def listens(self, address: str, *, chosen: bool) -> None:
        """Learn the address, before `start`. If it was `chosen`, a gateway that has it later takes this one's place."""
        ...


@runtime_checkable
class ServesModels(Protocol):
    """A service whose models a config file names."""

    async def apply(self, models: Sequence[ModelToLoad]) -> None:
        """Serve these models of the config file from now on: load, scale and unload what differs from the file before.

        Raises what is wrong with any of them before anything is changed.
        """
        ...
