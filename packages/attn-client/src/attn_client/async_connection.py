# ruff: noqa: ASYNC109 - gRPC sends the timeout to the server, as the deadline
"""A connection for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from attn_client.errors import error_of
from attn_client.operations import Operation, Page
from attn_client.settings import ClientSettings

Result = TypeVar("Result")


class AsyncConnection:
    """Runs operations over one channel; errors are those of `attn_core.errors`."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        if not self.settings.tls:
            return grpc.aio.insecure_channel(self.settings.address, self.settings.options)
        credentials = grpc.ssl_channel_credentials(self.settings.certificates)
        return grpc.aio.secure_channel(self.settings.address, credentials, self.settings.options)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close()

    async def unary(self, operation: Operation[Any, Result], timeout: float | None) -> Result:
        """The result of a call with one answer."""
        call = self._channel.unary_unary(
            operation.method, type(operation.request).SerializeToString, operation.response.FromString
        )
        try:
            answer = await call(operation.request, timeout=self._timeout(timeout), metadata=self.settings.metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self.settings.address) from None
        return operation.result(answer)

    async def stream(self, operation: Operation[Any, Result], timeout: float | None) -> AsyncGenerator[Result, None]:
        """The results of a call with many answers; closing the iterator cancels the call."""
        method = self._channel.unary_stream(
            operation.method, type(operation.request).SerializeToString, operation.response.FromString
        )
        call = method(operation.request, timeout=self._timeout(timeout), metadata=self.settings.metadata)
        try:
            async for answer in call:
                yield operation.result(answer)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self.settings.address) from None
        finally:
            call.cancel()

    async def pages(
        self, operation: Callable[[str], Operation[Any, Page[Result]]], timeout: float | None
    ) -> list[Result]:
        """All items of a list, page by page."""
        page = await self.unary(operation(""), timeout)
        items = list(page.items)
        while page.following:
            page = await self.unary(operation(page.following), timeout)
            items += page.items
        return items

    def _timeout(self, timeout: float | None) -> float | None:
        return self.settings.timeout if timeout is None else timeout
