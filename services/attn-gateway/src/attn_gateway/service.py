"""The protocols of the services and the HTTP server of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from attn_schema.methods import Row

    from attn_gateway.call import Metadata
    from attn_gateway.calls import Calls, Handler
    from attn_gateway.cluster import ModelToLoad
    from attn_gateway.settings import GatewaySettings


@runtime_checkable
class Service(Protocol):
    """A service of the gateway. Its life cycle is `handlers`, `start`, calls, `stop`; each happens once.

    Calls reach it only between the end of `start` and the beginning of `stop`: before and after, the gateway
    answers UNAVAILABLE and its health is NOT_SERVING.
    """

    @property
    def names(self) -> Sequence[str]:
        """The full names of its services, such as "attn.v1.CatalogService"; for health and reflection."""
        ...

    def handlers(self) -> Mapping[Row, Handler]:
        """The handler of each call that it answers; see `attn_gateway.calls.handlers_of`."""
        ...

    async def start(self) -> None:
        """Prepare for calls: start engines, load models. An error ends the whole server."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Free all resources; returns within about `shutdown_timeout` seconds.

        Called while the last calls still run: short ones may finish, long streams should end now. Also called when
        `start` failed or was cancelled, so it must handle resources that were never created.
        """
        ...


class ServingState(Protocol):
    """The interface of the gateway for its HTTP server."""

    @property
    def settings(self) -> GatewaySettings:
        """The settings of the gateway, such as the HTTP port and the tokens."""
        ...

    @property
    def calls(self) -> Calls:
        """The calls of all services."""
        ...

    @property
    def serving(self) -> bool:
        """Whether all services are ready."""
        ...

    def require_token(self, metadata: Metadata) -> None:
        """Raise `Unauthenticated` if callers need a token and this metadata has no valid one."""
        ...

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request in the metrics."""
        ...

    async def metrics(self, metadata: Metadata) -> bytes:
        """The metrics in Prometheus's text format; raises `Unauthenticated` if a required token is missing."""
        ...


@runtime_checkable
class HttpServer(Protocol):
    """An HTTP server for the services of a gateway. Its life cycle is `start`, requests, `stop`; each happens once."""

    @property
    def address(self) -> str:
        """The `host:port` to which clients connect; known after `start`."""
        ...

    async def start(self, gateway: ServingState) -> None:
        """Listen, while services may still start; raises `UserError` if the port is not available."""
        ...

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new requests and end the others within about `shutdown_timeout` seconds; also if `start` failed."""
        ...


@runtime_checkable
class KnowsItsAddress(Protocol):
    """A service that records the address of its gateway for other gateways."""

    def listens(self, address: str, *, chosen: bool) -> None:
        """Receive the address, before `start`; it is `chosen` if the port was configured, not picked by the system.

        A later gateway with the same chosen address succeeds this one.
        """
        ...


@runtime_checkable
class ServesModels(Protocol):
    """A service that serves the models of a config file."""

    async def apply(self, models: Sequence[ModelToLoad]) -> None:
        """Serve these models of the config file from now on: load, scale and unload the differences to the last file.

        Raises the errors of invalid models before anything is changed.
        """
        ...
