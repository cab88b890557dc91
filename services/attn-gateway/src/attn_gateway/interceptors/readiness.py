"""Admits calls to each service once it is ready, and counts the running calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from attn_core.errors import Unavailable

from attn_gateway.call import Context
from attn_gateway.interceptors.handlers import Continuation, Handler, around, is_own


class Readiness(grpc.aio.ServerInterceptor):
    """Refuses calls to services that are not ready with UNAVAILABLE, and counts the running calls."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._closing = False
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, service: str) -> None:
        """Admit calls to the service with this full name."""
        self._open.add(service)

    def close(self) -> None:
        """Refuse all new calls."""
        self._closing = True

    async def idle(self) -> None:
        """Wait until no call runs."""
        await self._idle.wait()

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the handler with the check and the counter."""
        handler = await continuation(details)
        if handler is None or is_own(details.method):
            return handler
        service = details.method.split("/")[1]

        @asynccontextmanager
        async def guard(_: Context) -> AsyncIterator[None]:
            if self._closing:
                raise Unavailable("the server is shutting down")
            if service not in self._open:
                raise Unavailable(f"{service} is still starting")
            self._inside += 1
            self._idle.clear()
            try:
                yield
            finally:
                self._inside -= 1
                if not self._inside:
                    self._idle.set()

        return around(handler, guard)
