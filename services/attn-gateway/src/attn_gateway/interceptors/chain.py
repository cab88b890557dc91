"""Several interceptors as one, which puts a method's handler together once and not at every call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import grpc
import grpc.aio

from attn_gateway.interceptors.handlers import Continuation, Handler

MOST_REMEMBERED = 4096
"""Handlers kept: those of a method for each tenant."""


@runtime_checkable
class DependsOnCall(Protocol):
    """An interceptor whose handler of a method is not the same for every call."""

    def variant(self, details: grpc.HandlerCallDetails) -> Hashable | None:
        """Calls with an equal variant have the same handler; that of None is not kept."""
        ...


class Chain(grpc.aio.ServerInterceptor):
    """The interceptors, the first outermost. Those that are no `DependsOnCall` look at nothing but the method."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._interceptors = tuple(interceptors)
        self._dependent = tuple(each for each in interceptors if isinstance(each, DependsOnCall))
        self._handlers: dict[Hashable, Handler] = {}

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler inside all interceptors."""
        variants = tuple(each.variant(details) for each in self._dependent)
        key = details.method, variants
        handler = self._handlers.get(key)
        if handler is None:
            for interceptor in reversed(self._interceptors):
                continuation = _inside(interceptor, continuation)
            handler = await continuation(details)
            # Names of methods that do not exist have no end.
            if handler is not None and None not in variants:
                if len(self._handlers) >= MOST_REMEMBERED:
                    self._handlers.clear()
                self._handlers[key] = handler
        return handler


def _inside(interceptor: grpc.aio.ServerInterceptor, inner: Continuation) -> Continuation:
    async def outer(details: Any) -> Handler | None:
        handler: Handler | None = await interceptor.intercept_service(inner, details)
        return handler

    return outer
