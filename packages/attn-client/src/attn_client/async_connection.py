# ruff: noqa: ASYNC109 - gRPC sends the timeout to the server, as the deadline
"""The asyncio connection to a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import AttnError, Unavailable
from attn_schema.codec import encode, from_message, message_class
from attn_schema.methods import Method, Request, Response, Row

from attn_client.errors import NoServer, error_of
from attn_client.settings import ClientSettings


class AsyncConnection:
    """Makes calls over one gRPC channel at a time; raises the errors of `attn_core.errors`.

    After a call fails because the server is unavailable, the next call uses the next of `settings.addresses`.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._at = 0
        self._channels = [self._open(address) for address in settings.addresses]

    def _open(self, address: str) -> grpc.aio.Channel:
        if not self.settings.tls:
            return grpc.aio.insecure_channel(address, self.settings.options)
        credentials = grpc.ssl_channel_credentials(self.settings.certificates)
        return grpc.aio.secure_channel(address, credentials, self.settings.options)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        for channel in self._channels:
            await channel.close()

    async def unary(
        self, row: Method[Request, Response], request: Request, timeout: float | None, *, repeatable: bool | None = None
    ) -> Response:
        """Make a call with one response. If no server answers, each address is tried once, unless the call may have
        been executed and is not repeatable, by default as its row says.
        """
        for _ in self._channels[1:]:
            try:
                return await self._unary(row, request, timeout)
            except NoServer as error:
                if not ((row.repeatable if repeatable is None else repeatable) or error.never_sent):
                    raise
        return await self._unary(row, request, timeout)

    async def _unary(self, row: Method[Request, Response], request: Request, timeout: float | None) -> Response:
        at = self._at
        call = self._channels[at].unary_unary(row.path, encode, message_class(row.response).FromString)
        try:
            answer = await call(request, timeout=self._timeout(timeout), metadata=self.settings.metadata)
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure, at) from None
        return from_message(row.response, answer)

    async def stream(
        self, row: Method[Request, Response], request: Request, timeout: float | None
    ) -> AsyncGenerator[Response, None]:
        """Make a call with a stream of responses; closing the iterator cancels the call."""
        at = self._at
        method = self._channels[at].unary_stream(row.path, encode, message_class(row.response).FromString)
        call = method(request, timeout=self._timeout(timeout), metadata=self.settings.metadata)
        try:
            async for answer in call:
                yield from_message(row.response, answer)
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure, at) from None
        finally:
            call.cancel()

    async def pages(self, row: Row, timeout: float | None) -> list[Any]:
        """Fetch all pages of a list."""
        pages = [await self.unary(row, row.request(), timeout)]
        while pages[-1].next_page_token:
            pages.append(await self.unary(row, row.request(page_token=pages[-1].next_page_token), timeout))
        return pages

    def _error(self, failure: grpc.aio.AioRpcError, at: int) -> AttnError:
        """The error of a failed call to address number `at`; after `Unavailable`, later calls use the next address."""
        error = error_of(failure, self.settings.addresses[at])
        if isinstance(error, Unavailable) and self._at == at:
            self._at = (at + 1) % len(self._channels)
        return error

    def _timeout(self, timeout: float | None) -> float | None:
        return self.settings.timeout if timeout is None else timeout
