"""Connections of HTTP clients: how many may stand, and how long each may take to send a request or read a response."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Callable
from typing import Any

import h11
import msgspec
import structlog
from attn_core.errors import AttnError, Unavailable
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from attn_openai.errors import SlowRequestError, body_of, headers_of, status_of

log = structlog.get_logger()

HEAD_SECONDS = 10.0
"""How long a client may take from connecting, or from the first byte of a further request, to the end of its head."""
READ_SECONDS = 60.0
"""How long a response may wait for a client that does not read it."""
HEAD, READ = "head", "read"
"""The timers of a connection."""
LINGER_SECONDS = 1.0
"""How long a closing connection waits for its client to read what was sent."""
LINGERING = 64
"""Most refused connections that wait for their client to read the refusal; further ones are closed at once."""


class Connections:
    """The connections that stand, at most `most`, and at most `most_per_address` from one address.

    At a limit, the connection that has been without a request for longest makes room for the new one; the new one is
    refused only while all of them have requests that run. So idle connections never keep a client out.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._by_address: dict[str, dict[LimitedProtocol, None]] = {}
        self._standing = 0
        self.lingering = 0

    def admit(self, connection: LimitedProtocol, address: str) -> str | None:
        """Count a new connection, closing an idle one if necessary; returns why it is refused, None if it is not."""
        own = self._by_address.get(address, {})
        if len(own) >= self._most_per_address and not self._close_idle(own):
            return f"{self._most_per_address} connections from this address have running requests, its maximum"
        if self._standing >= self._most and not self._close_one():
            return f"{self._most} connections have running requests, the maximum of this server"
        self._by_address.setdefault(address, {})[connection] = None
        self._standing += 1
        return None

    def touch(self, connection: LimitedProtocol, address: str) -> None:
        """Note that a connection has just become idle: others make room before it."""
        own = self._by_address.get(address, {})
        if connection in own:
            own[connection] = own.pop(connection)

    def leave(self, connection: LimitedProtocol, address: str) -> None:
        """Forget a connection."""
        own = self._by_address.get(address, {})
        if connection in own:
            del own[connection]
            self._standing -= 1
        if not own:
            self._by_address.pop(address, None)

    def _close_one(self) -> bool:
        """Close an idle connection of the address that has most; returns whether there was one."""
        return any(map(self._close_idle, sorted(self._by_address.values(), key=len, reverse=True)))

    @staticmethod
    def _close_idle(own: dict[LimitedProtocol, None]) -> bool:
        idle = next((connection for connection in own if connection.idle), None)
        if idle is not None:
            idle.drop()
        return idle is not None


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn within `Connections`, with limits for the times that its client may take.

    A client that is too slow with the head of a request is answered 408, one that comes at a limit 503. Connections
    that never sent a byte, and those over TLS before the end of the handshake, are closed without an answer.
    `tls` makes it start TLS itself, so that the limits hold during the handshake, too.
    """

    def __init__(self, connections: Connections, tls: ssl.SSLContext | None, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._all = connections
        self._tls = tls
        self._below: asyncio.Transport
        self._made = False
        self._address = ""
        self._sent_any = False
        self._early = b""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._starting: asyncio.Task[None] | None = None
        self._refused = False

    @property
    def idle(self) -> bool:
        """Whether no request of this connection runs: it waits for its client."""
        cycle: RequestResponseCycle | None = self.cycle  # None at first, which uvicorn's annotation omits
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit or refuse the connection; start TLS, if the server has it."""
        self._below = transport
        peer: tuple[str, int] | None = transport.get_extra_info("peername")
        self._address = network_of(peer[0]) if peer else ""
        refusal = self._all.admit(self, self._address)
        if refusal is not None:
            self._refuse(transport, Unavailable(refusal))
        elif self._tls is None:
            self._begin(transport)
        else:
            self._time(HEAD, HEAD_SECONDS, transport.abort)
            self._starting = asyncio.ensure_future(self._start_tls(transport, self._tls))

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for others."""
        self._stop(HEAD)
        self._stop(READ)
        self._all.leave(self, self._address)
        if self._refused:
            self._all.lingering -= 1
        elif self._made:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Limit the time until the head is complete."""
        if self._refused:
            return
        if not self._made:  # within the TLS handshake
            self._early += data
            return
        self._sent_any = True
        if self.idle and HEAD not in self._timers:
            self._time(HEAD, HEAD_SECONDS, self._too_slow)
        super().data_received(data)
        if not self.idle:
            self._stop(HEAD)

    def on_response_complete(self) -> None:
        """Limit the time for what the client still sends of this request, and for reading the response."""
        self._sent_any = False
        super().on_response_complete()
        self._all.touch(self, self._address)
        if self.transport.is_closing():
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        elif self.idle and self.conn.their_state is not h11.IDLE:
            self._time(HEAD, HEAD_SECONDS, self._close)

    def pause_writing(self) -> None:
        """Limit the time that a response waits for its reader."""
        if self._made:
            super().pause_writing()
            self._time(READ, READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with the response."""
        if self._made:
            super().resume_writing()
            self._stop(READ)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that had no further request."""
        self._close()

    def drop(self) -> None:
        """Close at once, to make room."""
        self._all.leave(self, self._address)
        self._below.abort()

    async def _start_tls(self, tcp: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            transport = await self.loop.start_tls(tcp, self, tls, server_side=True, ssl_handshake_timeout=HEAD_SECONDS)
        except (OSError, ssl.SSLError) as error:
            log.debug("TLS handshake failed", reason=str(error))
            transport = None
        if transport is None:
            tcp.abort()
            self._all.leave(self, self._address)
            self._stop(HEAD)
            return
        self._begin(transport)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._below, self._made = transport, True
        self._time(HEAD, HEAD_SECONDS, self._too_slow)
        super().connection_made(transport)

    def _too_slow(self) -> None:
        """Answer 408 to a client that has sent a part of a head."""
        if self._sent_any and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            error = SlowRequestError(f"the head of the request was not received within {HEAD_SECONDS:g} seconds")
            self.transport.write(answer_of(self.conn, error))
        self._close()

    def _refuse(self, transport: asyncio.Transport, error: AttnError) -> None:
        if self._tls is not None or self._all.lingering >= LINGERING:
            transport.abort()
            return
        self._refused = True
        self._all.lingering += 1
        transport.write(answer_of(self.conn, error))
        # Closing now would reset the connection, and the client might lose the answer: it is sending its request.
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, transport.abort)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _time(self, kind: str, seconds: float, act: Callable[[], None]) -> None:
        self._stop(kind)
        self._timers[kind] = self.loop.call_later(seconds, act)

    def _stop(self, kind: str) -> None:
        timer = self._timers.pop(kind, None)
        if timer is not None:
            timer.cancel()


def answer_of(connection: h11.Connection, error: AttnError) -> bytes:
    """A whole response with an error, for a connection that has no request yet and is closed after it."""
    body = msgspec.json.encode(body_of(error))
    status = status_of(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [(name.encode(), value.encode()) for name, value in (headers | headers_of(error)).items()]
    response = h11.Response(status_code=status, headers=lines, reason=STATUS_PHRASES[status])
    parts = (connection.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


def network_of(host: str) -> str:
    """The address whose connections are counted together: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
