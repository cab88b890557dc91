"""The synchronous connection to a server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import grpc
from attn_core.errors import AttnError, Unavailable

from attn_client.errors import NoServer, error_of
from attn_client.operations import Operation, Page
from attn_client.settings import ClientSettings

Result = TypeVar("Result")


class Connection:
    """Runs operations over one gRPC channel at a time; raises the errors of `attn_core.errors`.

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

    def unary(self, operation: Operation[Result], timeout: float | None) -> Result:
        """Make a call with one response. If no server answers, each address is tried once, unless the call may have
        been executed and is not repeatable.
        """
        for _ in self._channels[1:]:
            try:
                return self._unary(operation, timeout)
            except NoServer as error:
                if not (operation.idempotent or error.never_sent):
                    raise
        return self._unary(operation, timeout)

    def _unary(self, operation: Operation[Result], timeout: float | None) -> Result:
        at = self._at
        call = self._channels[at].unary_unary(*operation.codec)
        try:
            answer = call(operation.request, self._timeout(timeout), self.settings.metadata)
        except grpc.RpcError as failure:
            raise self._error(failure, at) from None
        return operation.result(answer)

    def stream(self, operation: Operation[Result], timeout: float | None) -> Generator[Result, None, None]:
        """Make a call with a stream of responses and yield their results; closing the iterator cancels the call."""
        at = self._at
        method = self._channels[at].unary_stream(*operation.codec)
        call = method(operation.request, self._timeout(timeout), self.settings.metadata)
        try:
            for answer in call:
                yield operation.result(answer)
        except grpc.RpcError as failure:
            raise self._error(failure, at) from None
        finally:
            call.cancel()

    def pages(self, operation: Callable[[str], Operation[Page[Result]]], timeout: float | None) -> list[Result]:
        """Fetch all pages of a list and return their items."""
        page = self.unary(operation(""), timeout)
        items = list(page.items)
        while page.following:
            page = self.unary(operation(page.following), timeout)
            items += page.items
        return items

    def _error(self, failure: grpc.RpcError, at: int) -> AttnError:
        """The error of a failed call to address number `at`; after `Unavailable`, later calls use the next address."""
        error = error_of(failure, self.settings.addresses[at])
        if isinstance(error, Unavailable) and self._at == at:
            self._at = (at + 1) % len(self._channels)
        return error

    def _timeout(self, timeout: float | None) -> float | None:
        return self.settings.timeout if timeout is None else timeout
