"""The synchronous connection to a server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import grpc
from attn_core.errors import AttnError, Unavailable
from attn_schema.codec import encode, from_message, message_class
from attn_schema.methods import Method, Request, Response, Row

from attn_client.errors import NoServer, error_of
from attn_client.settings import ClientSettings


class Connection:
    """Makes calls over one gRPC channel at a time; raises the errors of `attn_core.errors`.

    After a call fails because the server is unavailable, the next call uses the next of `settings.addresses`.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._at = 0
        self._channels = [self._open(address) for address in settings.addresses]

    def _open(self, address: str) -> grpc.Channel:
        if not self.settings.tls:
            return grpc.insecure_channel(address, self.settings.options)
        credentials = grpc.ssl_channel_credentials(self.settings.certificates)
        return grpc.secure_channel(address, credentials, self.settings.options)

    def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        for channel in self._channels:
            channel.close()

    def unary(
        self, row: Method[Request, Response], request: Request, timeout: float | None, *, repeatable: bool | None = None
    ) -> Response:
        """Make a call with one response. If no server answers, each address is tried once, unless the call may have
        been executed and is not repeatable, by default as its row says.
        """
        for _ in self._channels[1:]:
            try:
                return self._unary(row, request, timeout)
            except NoServer as error:
                if not ((row.repeatable if repeatable is None else repeatable) or error.never_sent):
                    raise
        return self._unary(row, request, timeout)

    def _unary(self, row: Method[Request, Response], request: Request, timeout: float | None) -> Response:
        at = self._at
        call = self._channels[at].unary_unary(row.path, encode, message_class(row.response).FromString)
        try:
            answer = call(request, self._timeout(timeout), self.settings.metadata)
        except grpc.RpcError as failure:
            raise self._error(failure, at) from None
        return from_message(row.response, answer)

    def stream(
        self, row: Method[Request, Response], request: Request, timeout: float | None
    ) -> Generator[Response, None, None]:
        """Make a call with a stream of responses; closing the iterator cancels the call."""
        at = self._at
        method = self._channels[at].unary_stream(row.path, encode, message_class(row.response).FromString)
        call = method(request, self._timeout(timeout), self.settings.metadata)
        try:
            for answer in call:
                yield from_message(row.response, answer)
        except grpc.RpcError as failure:
            raise self._error(failure, at) from None
        finally:
            call.cancel()

    def pages(self, row: Row, timeout: float | None) -> list[Any]:
        """Fetch all pages of a list."""
        pages = [self.unary(row, row.request(), timeout)]
        while pages[-1].next_page_token:
            pages.append(self.unary(row, row.request(page_token=pages[-1].next_page_token), timeout))
        return pages

    def _error(self, failure: grpc.RpcError, at: int) -> AttnError:
        """The error of a failed call to address number `at`; after `Unavailable`, later calls use the next address."""
        error = error_of(failure, self.settings.addresses[at])
        if isinstance(error, Unavailable) and self._at == at:
            self._at = (at + 1) % len(self._channels)
        return error

    def _timeout(self, timeout: float | None) -> float | None:
        return self.settings.timeout if timeout is None else timeout
