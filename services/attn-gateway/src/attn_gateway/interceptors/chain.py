"""Combines interceptors into one that builds the handler of a method once, not at every call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import grpc
import grpc.aio

from attn_gateway.interceptors.handlers import Continuation, Handler

MOST_REMEMBERED = 4096
"""Most handlers cached: one per method and tenant."""


@runtime_checkable
class DependsOnCall(Protocol):
    """An interceptor whose handler depends on the call, not only on the method."""

    def variant(self, details: grpc.HandlerCallDetails) -> Hashable | None:
        """The cache key of a call: calls with equal variants have the same handler; None is not cached."""
        ...


class Chain(grpc.aio.ServerInterceptor):
    """A chain of interceptors, the first outermost. Those that are not `DependsOnCall` use only the method's name."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._interceptors = tuple(interceptors)
        self._dependent = tuple(each for each in interceptors if isinstance(each, DependsOnCall))
        self._handlers: dict[Hashable, Handler] = {}

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a method, wrapped by all interceptors."""
        variants = tuple(each.variant(details) for each in self._dependent)
        key = details.method, variants
        handler = self._handlers.get(key)
        if handler is None:
            for interceptor in reversed(self._interceptors):
                continuation = _inside(interceptor, continuation)
            handler = await continuation(details)
            # Unknown methods are not cached, as clients can send any number of names.
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
