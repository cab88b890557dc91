"""The settings of the gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue

from attn_gateway.tenants import Tenants

POSITIVE = (
    "max_request_bytes", "max_calls", "max_streams_per_connection", "max_connections", "max_connections_per_address",
    "keepalive_seconds",
)  # fmt: skip
"""Settings that must be above 0."""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The server's certificate chain and private key, both PEM."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """Private key and certificate chain; raises `InvalidValue` naming a file that cannot be read."""
        return _read(self.key, "tls_key"), _read(self.certificate, "tls_cert")


@dataclass(frozen=True, kw_only=True)
class ReplicaTls:
    """The files for mutual TLS of gateways and replicas: a certificate, its key and their authority, all PEM.

    The certificate is for the DNS name replica.attn.internal, as replicas may listen at any address of the cluster.
    """

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Private key, certificate chain and authority; raises `InvalidValue` naming a file that cannot be read."""
        named = ("replica_tls_key", "replica_tls_cert", "replica_tls_ca")
        key, certificate, authority = map(_read, (self.key, self.certificate, self.authority), named)
        return key, certificate, authority


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Addresses, tokens and limits; raises `InvalidValue` for an unprotected gateway that other machines can reach.

    Sizes are in bytes, times in seconds. `port` 0 picks a free port, and so does `http_port` 0; with `http_port` None
    there is no HTTP. `token` is the bearer token that callers must send, or one of `other_tokens`, each of another
    tenant; alternatively, `token_file` contains the tokens (see `attn_gateway.tenants`), and is read again when it
    changes. `insecure` allows hosts other than loopback without token and TLS. `max_streams_per_connection` calls of a
    connection run at the same time, some more wait, and further ones are refused. At most `max_connections` stand at
    each port (fewer if the process may open too few files), over HTTP at most `max_connections_per_address` from one
    address. Spans of calls are sent to the collector at the URL `otlp_traces_endpoint` over OTLP. Web pages of
    `cors_origins` may call over HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    token: str | None = None
    other_tokens: tuple[str, ...] = ()
    token_file: Path | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    max_request_bytes: int = 4 * 2**20
    max_calls: int = 1024
    max_streams_per_connection: int = 256
    max_connections: int = 4096
    max_connections_per_address: int = 1024
    keepalive_seconds: float = 20.0
    keepalive_timeout_seconds: float = 10.0
    otlp_traces_endpoint: str | None = None
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, port in (("port", self.port), ("http_port", self.http_port or 0)):
            if not 0 <= port <= 65535:
                raise InvalidValue.of(field, port, "0 to 65535")
        for token in self.tokens:
            if not token or not token.isascii() or not token.isprintable():
                raise InvalidValue("token: must be printable ASCII and not empty", field="token")
        if self.other_tokens and self.token is None:
            raise InvalidValue("other_tokens: given without a token", field="other_tokens")
        if self.token_file is not None and self.token is not None:
            raise InvalidValue("token_file: given together with a token", field="token_file")
        for field in POSITIVE:
            if getattr(self, field) <= 0:
                raise InvalidValue.of(field, getattr(self, field), "more than 0")
        if not (is_loopback(self.host) or self.insecure or ((self.token or self.token_file) and self.tls)):
            raise InvalidValue(
                f"host: {self.host!r} can be reached from other machines; give a token and TLS, or --insecure",
                field="host",
                given=self.host,
            )

    @property
    def connections_allowed(self) -> int:
        """The most connections of one port: `max_connections`, or a third of the files that the process may open."""
        try:
            import resource
        except ModuleNotFoundError:  # Windows has no such limit
            return self.max_connections
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.max_connections if files == resource.RLIM_INFINITY else min(self.max_connections, files // 3)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in these settings; empty if they are in a file, or if no token is required."""
        return () if self.token is None else (self.token, *self.other_tokens)

    def tenants(self) -> Tenants:
        """The tenants that may call; empty if no token is required. Raises `UserError` for an invalid token file."""
        return Tenants.of_tokens(self.tokens) if self.token_file is None else Tenants.of_file(self.token_file)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{field}: {path}: {error.strerror or error}", field=field, given=path) from error
