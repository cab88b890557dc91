"""`attn serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue
from attn_core.home import home_folder

from attn_gateway.call import tenant_named
from attn_gateway.cluster import ClusterSettings, ModelToLoad
from attn_gateway.gateway import Gateway
from attn_gateway.logs import configure_logs
from attn_gateway.serve import ServeSettings, serve
from attn_gateway.settings import GatewaySettings, TlsFiles, read_tokens

Text = typer.Option


def serve_command(  # noqa: PLR0913 - a command has the options it has
    *,
    host: Annotated[str, Text(help="Address to listen on. Other than loopback needs a token and TLS.")] = "127.0.0.1",
    port: Annotated[int, Text(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 50051,
    model: Annotated[
        list[str] | None,
        Text(metavar="NAME[=PATH]", help="Serve this model: a registered name, or a folder. May be repeated."),
    ] = None,
    weights: Annotated[
        str | None,
        Text(
            help="Keep weights of linear layers as float32, bfloat16, int8 or int4 (fewer bytes decode faster), as "
            "they are stored, losing nothing (auto), or unpacked.",
            show_default="auto",
        ),
    ] = None,
    cache: Annotated[
        str | None, Text(help="How models remember states, such as int8; `attn list caches` names the ways.")
    ] = None,
    guesses: Annotated[
        int | None,
        Text(help="Tokens to guess ahead at a step: text that repeats itself comes faster.", min=0, max=32),
    ] = None,
    draft: Annotated[
        str | None, Text(metavar="NAME|PATH", help="A smaller model of the same tokens that guesses: 4 unless told.")
    ] = None,
    branches: Annotated[
        int, Text(help="In how many ways a guess may go on; more than one is checked as a tree.", min=1, max=8)
    ] = 1,
    offload_bytes: Annotated[
        int, Text(help="Memory for states of requests that had to leave, so that they are not computed again.", min=0)
    ] = 0,
    token_file: Annotated[
        Path | None,
        Text(
            help="File with the bearer tokens that let in, one a tenant and line, perhaps with a number behind it: "
            "who has 2 is served twice as much as who has 1 while both wait. Readable by you alone."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, Text(help="Certificate chain (PEM) for TLS.")] = None,
    tls_key: Annotated[Path | None, Text(help="Private key (PEM) of the certificate.")] = None,
    insecure: Annotated[bool, Text("--insecure", help="Listen beyond loopback without token and TLS.")] = False,
    ready_file: Annotated[
        Path | None, Text(help="Write JSON with address and pid here while serving; for scripts.")
    ] = None,
    home: Annotated[
        Path | None, Text(help="Folder for models and jobs.", envvar="ATTN_HOME", show_default="~/.local/share/attn")
    ] = None,
    cpus: Annotated[int | None, Text(help="CPUs for a private Ray; all by default.", min=1)] = None,
    grace: Annotated[float, Text(help="Seconds that running calls may take at the end.", min=0)] = 10.0,
) -> None:
    """Serve mechanisms, models and training jobs over gRPC.

    Starts a private Ray on this machine when a service needs it, or joins the cluster at `RAY_ADDRESS`.
    Ctrl-C drains: running calls may end, new ones are refused; a second Ctrl-C does not wait.

    Example: `attn serve --model smollm2-135m-instruct --model mine=./runs/shakespeare`
    """
    if (tls_cert is None) != (tls_key is None):
        raise InvalidValue("TLS needs both --tls-cert and --tls-key", field="tls_cert")
    tenants = read_tokens(token_file) if token_file else {}
    tokens = tuple(tenants)
    settings = ServeSettings(
        gateway=GatewaySettings(
            host=host,
            port=port,
            token=tokens[0] if tokens else None,
            other_tokens=tokens[1:],
            tls=TlsFiles(certificate=tls_cert, key=tls_key) if tls_cert and tls_key else None,
            insecure=insecure,
        ),
        cluster=ClusterSettings(
            address=os.environ.get("RAY_ADDRESS") or None,
            cpus=cpus,
            home=home or home_folder(),
            models=tuple(ModelToLoad.parse(text) for text in model or ()),
            weights=weights,
            cache=cache,
            guesses=guesses,
            # The service does not know this shell's folder.
            draft=str(Path(draft).resolve()) if draft and Path(draft).is_dir() else draft,
            offload_bytes=offload_bytes,
            branches=branches,
            shares={tenant_named(token): share for token, share in tenants.items()},
        ),
        ready_file=ready_file,
        grace=grace,
    )
    # gRPC would report each process that Ray starts below it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    configure_logs()
    received = asyncio.run(serve(settings, announce))
    if received is signal.SIGINT:
        raise KeyboardInterrupt


def announce(gateway: Gateway) -> None:
    """Tell the person at the terminal where the server listens."""
    secure = "with TLS" if gateway.settings.tls else "without TLS"
    typer.echo(f"attn: serving on {gateway.address} ({secure}); Ctrl-C stops", err=True)
