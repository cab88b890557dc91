"""What a gRPC service is to the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import grpc.aio


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
