"""The command `attn serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from attn_schema import ClusterConfig, DeploymentConfig, EngineConfig, ServerConfig
from attn_schema.config_file import read_config
from attn_schema.flags import CONFIG, with_flags
from attn_schema.home import home_folder, private_folder
from attn_schema.output import note
from attn_schema.schema import Schema

from attn_gateway.cluster import ClusterSettings, ModelToLoad
from attn_gateway.gateway import Gateway
from attn_gateway.logs import configure_logs
from attn_gateway.serve import ServeSettings, serve
from attn_gateway.settings import GatewaySettings, ReplicaTls, TlsFiles
from attn_gateway.tenants import Tenants


@with_flags(top="cluster")
def serve_command(  # noqa: PLR0913 - options, given by name
    *,
    context: typer.Context,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="NAME|PATH|NAME=PATH", help="Models to serve, as with --model.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH|NAME=PATH",
            help="Serve this model: a registered name, folder or GGUF file, optionally under a NAME. May be repeated.",
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|PATH|NAME=PATH",
            help="Serve this LoRA adapter, a registered name or folder, on its base model. May be repeated.",
        ),
    ] = None,
    server: ServerConfig,
    engine: EngineConfig,
    deployment: DeploymentConfig,
    cluster: ClusterConfig,
) -> None:
    """Serve mechanisms, models and training jobs over gRPC.

    Models and jobs run in child processes of the server, or on Ray: with `--ray` on a private instance that the server
    starts, as it does for several replicas, or on the cluster at `RAY_ADDRESS`.
    Ctrl-C drains: running calls may finish, new ones are refused; a second Ctrl-C stops at once. The engine options
    apply to the models given here; `attn models load` has its own.
    On SIGHUP, the server reads `--config FILE` again and changes its models accordingly.

    Example: `attn serve smollm2-135m-instruct mine=./runs/shakespeare ./SmolLM2-Q4_K_M.gguf`
    """
    given = tuple(at_its_path(ModelToLoad.parse(text)) for text in (*(models or ()), *(model or ())))
    path = context.params.get(CONFIG)
    tenants = Tenants.of_file(server.token_file).all() if server.token_file else []
    tls = TlsFiles(certificate=server.tls_cert, key=server.tls_key) if server.tls_cert and server.tls_key else None
    settings = ServeSettings(
        gateway=GatewaySettings(
            host=server.host,
            port=server.port,
            http_port=server.http_port,
            token_file=server.token_file,
            tls=tls,
            insecure=server.insecure,
            otlp_traces_endpoint=server.otlp_traces_endpoint,
            cors_origins=tuple(filter(None, (server.cors_origins or "").replace(" ", "").split(","))),
        ),
        cluster=ClusterSettings(
            ray=server.ray,
            address=os.environ.get("RAY_ADDRESS") or None,
            cpus=server.cpus,
            home=private_folder(server.home or home_folder()),
            models=(*given, *ModelToLoad.of(cluster)),
            adapters=tuple(ModelToLoad.parse(text) for text in lora_modules or ()),
            engine=engine.replace(
                draft_model=_absolute(engine.draft_model),
                tenant_weights={tenant.name: tenant.weight for tenant in tenants},
            ),
            deployment=deployment,
            replica_tls=replica_tls_of(server),
        ),
        ready_file=server.ready_file,
        shutdown_timeout=server.shutdown_timeout,
        models_again=lambda: (*given, *models_of(path)),
    )
    # Otherwise gRPC would log each child process that Ray starts.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    configure_logs(server.log_level)
    received = asyncio.run(serve(settings, announce))
    if received is signal.SIGINT:
        raise KeyboardInterrupt


def replica_tls_of(server: ServerConfig) -> ReplicaTls | None:
    """The TLS files for connections to replicas; None if not configured. Raises `InvalidValue` for unreadable files."""
    if server.replica_tls_cert is None or server.replica_tls_key is None or server.replica_tls_ca is None:
        return None
    # Replicas run in other working directories.
    files = ReplicaTls(
        certificate=server.replica_tls_cert.absolute(),
        key=server.replica_tls_key.absolute(),
        authority=server.replica_tls_ca.absolute(),
    )
    files.read()
    return files


def models_of(path: Path | None) -> tuple[ModelToLoad, ...]:
    """The models in a config file as it is now; empty without a file. Raises for an invalid file, as at the start."""
    if path is None:
        return ()
    tables: dict[str, type[Schema]] = {"server": ServerConfig, "engine": EngineConfig, "deployment": DeploymentConfig}
    values = read_config(path)
    for table, noun in tables.items():
        noun.from_mapping(values.pop(table, {}), table)
    return ModelToLoad.of(ClusterConfig.from_mapping(values))


def at_its_path(model: ModelToLoad) -> ModelToLoad:
    """The model with its source, if it is a path, made absolute; a file without a given name is named after itself,
    without its suffix."""
    path = Path(model.source).expanduser()
    if not path.exists() or ("/" not in model.source and not path.is_file()):
        return model
    name = path.stem if model.name == path.name and path.is_file() else model.name
    return replace(model, name=name, source=str(path.resolve()))


def _absolute(model: str | None) -> str | None:
    """An existing folder or file as an absolute path, as engines run in other working directories; else the name."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model


def announce(gateway: Gateway) -> None:
    """Print the address at which the server listens to the terminal."""
    secure = "with TLS" if gateway.settings.tls else "without TLS"
    http = "" if gateway.http is None else f", HTTP on {gateway.http.address}"
    note(f"attn: serving on {gateway.address}{http} ({secure}); Ctrl-C stops")
