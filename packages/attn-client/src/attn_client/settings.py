"""Where the server is and how to be let in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions
from attn_schema.settings import DEFAULT_ADDRESS, addresses_of

MAX_RESPONSE_BYTES = 256 * 2**20
"""The largest message taken from a server; attention maps of long prompts are large."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """`address` is `host:port`, or several of them separated by commas, which stand in for one another.

    `token` is the bearer token; `certificates` PEM of the authority that signed the server's. With `tls` and no
    `certificates` the authorities of the system are trusted. `timeout` in seconds is for each call that is not given
    one of its own; None waits for as long as it takes.
    """

    address: str = DEFAULT_ADDRESS
    token: str | None = None
    tls: bool = False
    certificates: bytes | None = None
    timeout: float | None = None

    @classmethod
    def of(cls, options: ConnectionOptions) -> ClientSettings:
        """With the content of the files that the options name; raises `InvalidValue` for one that cannot be read."""
        token = _read(options.token_file, "token_file")
        certificates = _read(options.tls_ca, "tls_ca")
        return cls(
            address=options.address,
            token=None if token is None else token.decode().strip(),
            tls=certificates is not None,
            certificates=certificates,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where a server may answer, in the order in which they are tried; raises `InvalidValue` for no address."""
        return addresses_of(self.address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, int]]:
        """Channel arguments: pings find out within half a minute that a server is gone."""
        return [
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # A server that is started again is found again soon; gRPC would wait for up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]


def _read(path: Path | None, option: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{option}: {path}: {error.strerror}", field=option, given=path) from error
