"""How the gateway is configured."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue

from attn_gateway.tenants import Tenants


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
    """How gateways and replicas prove to each other who they are: a certificate, its key and their authority, all PEM.

    The certificate is for the DNS name replica.attn.internal, as replicas listen wherever they are placed.
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
    """Where the gateway listens and whom it lets in; raises `InvalidValue` for one that anybody can reach.

    Sizes are in bytes, times in seconds. `port` 0 picks a free one, and so does `http_port`; without that there is no
    HTTP. `token` is the bearer token callers must give, or one of `other_tokens`, each of another tenant; or
    `token_file` names them (see `attn_gateway.tenants`), and is read again when it changes.
    `insecure` allows other hosts than loopback without token and TLS. Of a connection `max_streams_per_connection`
    calls run at a time, some more wait, and others are refused. Spans of calls are sent to the collector at
    `otlp_traces_endpoint`, a URL, over OTLP.
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
    keepalive_seconds: float = 20.0
    keepalive_timeout_seconds: float = 10.0
    otlp_traces_endpoint: str | None = None

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
        for field in ("max_request_bytes", "max_calls", "max_streams_per_connection", "keepalive_seconds"):
            if getattr(self, field) <= 0:
                raise InvalidValue.of(field, getattr(self, field), "more than 0")
        if not (is_loopback(self.host) or self.insecure or ((self.token or self.token_file) and self.tls)):
            raise InvalidValue(
                f"host: {self.host!r} can be reached from other machines; give a token and TLS, or --insecure",
                field="host",
                given=self.host,
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens given here; none if they are in a file, or no token is needed."""
        return () if self.token is None else (self.token, *self.other_tokens)

    def tenants(self) -> Tenants:
        """Who may call; nobody is named where no token is needed. Raises `UserError` for a file that is no such."""
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
