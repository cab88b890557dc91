"""Where the server is and how to be let in."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ADDRESS = "127.0.0.1:50051"
LARGEST_RESPONSE = 256 * 2**20
"""The largest message taken from a server, in bytes; attention maps of long prompts are large."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """`address` is `host:port`; `token` the bearer token; `certificates` PEM of the authority that signed the server's.

    With `tls` and no `certificates` the authorities of the system are trusted. `timeout` in seconds is for each
    call that is not given one of its own; None waits for as long as it takes.
    """

    address: str = DEFAULT_ADDRESS
    token: str | None = None
    tls: bool = False
    certificates: bytes | None = None
    timeout: float | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, int]]:
        """Channel arguments: pings find out within half a minute that a server is gone."""
        return [
            ("grpc.max_receive_message_length", LARGEST_RESPONSE),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
