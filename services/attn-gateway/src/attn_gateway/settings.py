"""How the gateway is configured."""

from __future__ import annotations

import ipaddress
import stat
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue, UserError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The server's certificate chain and private key, both PEM."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """Private key and certificate chain; raises `InvalidValue` naming a file that cannot be read."""
        return _read(self.key, "tls_key"), _read(self.certificate, "tls_cert")


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Where the gateway listens and whom it lets in; raises `InvalidValue` for one that anybody can reach.

    Sizes are in bytes, times in seconds. `port` 0 picks a free one, and so does `http_port`; without that there is no
    HTTP. `token` is the bearer token callers must give,
    or one of `other_tokens`: callers of another token are another tenant, with a weight in fair queueing and a
    prefix cache of their own.
    `insecure` allows other hosts than loopback without token and TLS.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    token: str | None = None
    other_tokens: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    insecure: bool = False
    max_request_bytes: int = 4 * 2**20
    max_calls: int = 1024
    max_streams_per_connection: int = 256
    keepalive_seconds: float = 20.0
    keepalive_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field, port in (("port", self.port), ("http_port", self.http_port or 0)):
            if not 0 <= port <= 65535:
                raise InvalidValue.of(field, port, "0 to 65535")
        for token in self.tokens:
            if not token or not token.isascii() or not token.isprintable():
                raise InvalidValue("token: must be printable ASCII and not empty", field="token")
        if self.other_tokens and self.token is None:
            raise InvalidValue("other_tokens: given without a token", field="other_tokens")
        for field in ("max_request_bytes", "max_calls", "max_streams_per_connection", "keepalive_seconds"):
            if getattr(self, field) <= 0:
                raise InvalidValue.of(field, getattr(self, field), "more than 0")
        if not (is_loopback(self.host) or self.insecure or (self.token and self.tls)):
            raise InvalidValue(
                f"host: {self.host!r} can be reached from other machines; give a token and TLS, or --insecure",
                field="host",
                given=self.host,
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        """All tokens that are accepted; none if no token is needed."""
        return () if self.token is None else (self.token, *self.other_tokens)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_tokens(path: Path) -> dict[str, float]:
    """The tokens in a file that only its owner can read, a line each, and their weights: the number after one, or 1.

    Raises `UserError` for another file, and for a weight that is not above 0 or is given twice.
    """
    lines = _read(path, "token_file").decode("utf-8", errors="replace").splitlines()
    found: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        token, *rest = line.split()[:3] or [""]
        weight = _weight(rest, f"token_file: line {number}")
        if token and found.setdefault(token, weight) != weight:
            raise UserError(
                f"token_file: line {number} gives a token of another line another weight", field="token_file"
            )
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"token_file: {path} can be read by others; run: chmod 600 {path}", field="token_file")
    if not found:
        raise UserError(f"token_file: {path} is empty", field="token_file")
    return found


def _weight(words: list[str], place: str) -> float:
    """The weight that follows a token; errors do not quote the token."""
    if not words:
        return 1.0
    try:
        weight = float(words[0]) if len(words) == 1 else 0.0
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise UserError(f"{place} is neither a token nor a token and a weight above 0", field="token_file")
    return weight


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{field}: {path}: {error.strerror or error}", field=field, given=path) from error
