"""Options that the commands share, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core.errors import InvalidValue

from attn_client.client import Client
from attn_client.settings import DEFAULT_ADDRESS, ClientSettings

Address = Annotated[
    str,
    typer.Option(help="Server as HOST:PORT.", envvar="ATTN_ADDRESS", rich_help_panel="Connection", metavar="HOST:PORT"),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the server's bearer token.", envvar="ATTN_TOKEN_FILE", rich_help_panel="Connection"),
]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", help="PEM file of the authority to trust; turns TLS on.", envvar="ATTN_TLS_CA",
        rich_help_panel="Connection",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, one value a line.")]

Weights = Annotated[
    str | None,
    typer.Option(help="With a model here, keep its weights as float32, bfloat16, int8, int4, auto or unpacked."),
]

ADDRESS = DEFAULT_ADDRESS


def connect(address: str, token_file: Path | None, certificates: Path | None) -> Client:
    """A client for these options; raises `InvalidValue` for a file that cannot be read or an address without port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidValue.of("address", address, "HOST:PORT")
    token = _read(token_file, "--token-file").decode().strip() if token_file else None
    return Client(
        ClientSettings(
            address=address,
            token=token,
            tls=certificates is not None,
            certificates=_read(certificates, "--tls-ca") if certificates else None,
        )
    )


def print_line(value: Any) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{option}: {path}: {error.strerror}", field=option, given=path) from error
