"""Connection settings of the client: address, token, TLS and timeout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_schema import ConnectionOptions
from attn_schema.settings import DEFAULT_ADDRESS, addresses_of
from attn_schema.text_files import lines_of, read_text

MAX_RESPONSE_BYTES = 256 * 2**20
"""The maximum size of a message from a server; attention maps of long prompts are large."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """The connection settings. `address` is `host:port`, or several, separated by commas, that replace one another.

    `token` is the bearer token; `certificates` is the PEM certificate of the authority that signed the server's
    certificate. With `tls` and no `certificates`, the system's authorities are trusted. `timeout`, in seconds, applies
    to each call that is given none; None means no time limit.
    """

    address: str = DEFAULT_ADDRESS
    token: str | None = None
    tls: bool = False
    certificates: bytes | None = None
    timeout: float | None = None

    @classmethod
    def of(cls, options: ConnectionOptions) -> ClientSettings:
        """Make settings from command-line options; raises `InvalidValue` for a named file that is not as it must be."""
        certificates = _read(options.tls_ca, "tls_ca")
        return cls(
            address=options.address,
            token=None if options.token_file is None else token_in(options.token_file),
            tls=certificates is not None,
            certificates=certificates,
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The server addresses, in the order in which they are tried; raises `InvalidValue` for a malformed address."""
        return addresses_of(self.address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata that is sent with each call: the authorization header, if there is a token."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, int]]:
        """The gRPC channel arguments; keepalive pings detect within half a minute that a server is gone."""
        return [
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # Reconnect quickly to a restarted server; gRPC's default backoff is up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]


def token_in(path: Path) -> str:
    """The token of a file of one line; the settings of its tenant may follow it, as in the file of a server.

    Raises `InvalidValue` for any other file; the error does not quote it.
    """
    lines = [line.split() for line in lines_of(read_text(path, "token_file")) if line.strip()]
    if len(lines) != 1:
        given = f"{path} with {len(lines)} lines"
        raise InvalidValue.of("token_file", given, "a file of one line: the token to send, and of no other tenant")
    if not (lines[0][0].isascii() and lines[0][0].isprintable()):
        raise InvalidValue.of("token_file", path, "a token of printable ASCII")
    return lines[0][0]


def _read(path: Path | None, option: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{option}: {path}: {error.strerror}", field=option, given=path) from error
