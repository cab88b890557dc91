"""Configuration of a server, and of a client's connection to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from attn_core.errors import InvalidValue
from msgspec import Meta

from attn_schema.schema import Checked

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
CONNECTION = "Connection"
MAX_CPUS = 4096


class ConnectionOptions(Checked, frozen=True, kw_only=True):
    """How a client connects to a server: addresses, token and TLS."""

    address: Annotated[
        str,
        Meta(
            description="Address of the server as HOST:PORT, or of several gateways of one cluster, separated by "
            "commas; if one does not answer, the next is tried.",
            extra={"envvar": "ATTN_ADDRESS", "panel": CONNECTION, "metavar": "HOST:PORT"},
        ),
    ] = DEFAULT_ADDRESS  # fmt: skip
    token_file: Annotated[
        Path,
        Meta(
            description="File of one line: a bearer token, which settings of its tenant may follow as in the server's "
            "file.",
            extra={"envvar": "ATTN_TOKEN_FILE", "panel": CONNECTION},
        ),
    ] | None = None  # fmt: skip
    tls_ca: Annotated[
        Path,
        Meta(
            description="PEM file of the certificate authority to trust; turns TLS on.",
            extra={"envvar": "ATTN_TLS_CA", "panel": CONNECTION},
        ),
    ] | None = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        addresses_of(self.address)


def addresses_of(text: str) -> tuple[str, ...]:
    """Split "HOST:PORT" or "HOST:PORT,HOST:PORT" into addresses; raises `InvalidValue` for anything else."""
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidValue.of("address", text, "HOST:PORT, or several separated by commas")
    return addresses


class ServerConfig(Checked, frozen=True, kw_only=True):
    """A server's network addresses, authentication and TLS, logging, storage folder and shutdown."""

    host: Annotated[
        str, Meta(description="Address to listen on; any address other than loopback requires a token and TLS.")
    ] = "127.0.0.1"  # fmt: skip
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = DEFAULT_PORT
    http_port: Annotated[
        int,
        Meta(
            ge=0, le=65535,
            description="Port for HTTP, including the OpenAI-compatible API; 0 picks a free one. No HTTP if not given.",
        ),
    ] | None = None  # fmt: skip
    token_file: Annotated[
        Path,
        Meta(
            description="File with bearer tokens, one per line, each followed by settings of its tenant, such as "
            "`tenant=ann role=user weight=2 max_running=4 requests_per_minute=60 tokens_per_minute=20000 max_models=2 "
            "max_memory_bytes=8e9`; it must be readable by its owner only, and is read again when it changes or at "
            "SIGHUP.",
        ),
    ] | None = None  # fmt: skip
    tls_cert: Annotated[Path, Meta(description="Certificate chain for TLS (PEM).")] | None = None
    tls_key: Annotated[Path, Meta(description="Private key of the certificate (PEM).")] | None = None
    replica_tls_cert: Annotated[
        Path,
        Meta(
            description="Certificate for mutual TLS between gateways and replicas (PEM), at this path on every "
            "machine; it must be valid for the DNS name replica.attn.internal.",
        ),
    ] | None = None  # fmt: skip
    replica_tls_key: Annotated[Path, Meta(description="Private key of that certificate (PEM).")] | None = None
    replica_tls_ca: Annotated[
        Path, Meta(description="Certificate authority that signed the certificates of gateways and replicas (PEM).")
    ] | None = None  # fmt: skip
    insecure: Annotated[bool, Meta(description="Allow addresses other than loopback without token and TLS.")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum level of the lines in the log; info has a line for each call."),
    ] = "info"  # fmt: skip
    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            min_length=1, description="URL of an OpenTelemetry collector, to which a span of each call is sent over "
            "OTLP.",
            extra={"metavar": "URL"},
        ),
    ] | None = None  # fmt: skip
    cors_origins: Annotated[
        str,
        Meta(min_length=1, description="Origins of web pages that may call over HTTP, separated by commas; * is any."),
    ] | None = None  # fmt: skip
    ready_file: Annotated[
        Path, Meta(description="File that holds the address and the process id as JSON while the server is serving.")
    ] | None = None  # fmt: skip
    home: Annotated[
        Path,
        Meta(
            description="Folder for models and jobs; ~/.local/share/attn if not given.", extra={"envvar": "ATTN_HOME"}
        ),
    ] | None = None  # fmt: skip
    ray: Annotated[
        bool,
        Meta(description="Run models and jobs on Ray, which is started on this machine unless RAY_ADDRESS is set."),
    ] = False
    cpus: Annotated[
        int, Meta(ge=1, le=MAX_CPUS, description="CPUs for the workers of training jobs; all if not given.")
    ] | None = None  # fmt: skip
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that running calls may take to finish at shutdown.")
    ] = 10.0  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidValue("TLS needs both --tls-cert and --tls-key", field="tls_cert")
        given = (self.replica_tls_cert, self.replica_tls_key, self.replica_tls_ca)
        if None in given and any(path is not None for path in given):
            needed = "--replica-tls-cert, --replica-tls-key and --replica-tls-ca"
            raise InvalidValue(f"TLS of replicas needs {needed}", field="replica_tls_cert")
