"""`attn models`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from attn.v1.model_pb2 import EngineOptions

from attn_client.commands.options import ADDRESS, Address, Certificates, Json, TokenFile, connect, print_line
from attn_client.commands.tables import print_table
from attn_client.results.models import Model

app = typer.Typer(no_args_is_help=True, help="The models of a server.")


@app.command("list")
def list_command(
    *, json: Json = False, address: Address = ADDRESS, token_file: TokenFile = None, certificates: Certificates = None
) -> None:
    """List the models that the server has loaded."""
    with connect(address, token_file, certificates) as client:
        models = client.models.list()
    if json:
        for model in models:
            print_line(dataclasses.asdict(model))
    else:
        print_table([_row(model) for model in models], "no model is loaded; load one with: attn models load NAME")


@app.command("load")
def load_command(  # noqa: PLR0913 - a command has the options it has
    *,
    name: Annotated[str, typer.Argument(help="Name that requests will use.")],
    source: Annotated[str, typer.Argument(help="Folder on the server, registered name, or id of a finished job.")] = "",
    dtype: Annotated[str, typer.Option(help="Element type to compute in, such as float32.")] = "",
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda:0.")] = "",
    kernel: Annotated[str, typer.Option(help="Attention kernel, by name.")] = "",
    weights: Annotated[str, typer.Option(help="Keep weights as float32, bfloat16, int8, int4, auto or unpacked.")] = "",
    guesses: Annotated[int | None, typer.Option(help="Tokens to guess ahead where a request does not say.")] = None,
    draft: Annotated[str, typer.Option(help="A smaller model of the same tokens that guesses: name or folder.")] = "",
    branches: Annotated[int | None, typer.Option(help="In how many ways a guess may go on, as a tree.")] = None,
    offload_bytes: Annotated[int | None, typer.Option(help="Memory for states of requests that had to leave.")] = None,
    address: Address = ADDRESS,
    token_file: TokenFile = None,
    certificates: Certificates = None,
) -> None:
    """Load a model; returns when it answers requests."""
    # The server does not know this shell's folder.
    place, helper = (str(Path(text).resolve()) if text and Path(text).is_dir() else text for text in (source, draft))
    engine = EngineOptions(
        dtype=dtype,
        device=device,
        kernel=kernel,
        weights=weights,
        guesses=guesses,
        draft=helper,
        offload_bytes=offload_bytes,
        branches=branches,
    )
    with connect(address, token_file, certificates) as client:
        model = client.models.load(name, place, engine=engine)
    typer.echo(f"{model.name} is {model.state}: {model.parameters:,} parameters, context {model.context_length}")
    if model.note:
        typer.echo(f"attn: {model.note}", err=True)


@app.command("unload")
def unload_command(
    *,
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    grace: Annotated[float | None, typer.Option(help="Seconds that running requests may take to end.")] = None,
    address: Address = ADDRESS,
    token_file: TokenFile = None,
    certificates: Certificates = None,
) -> None:
    """Take a model out of service."""
    with connect(address, token_file, certificates) as client:
        client.models.unload(name, grace_seconds=grace)
    typer.echo(f"{name} is unloaded")


def _row(model: Model) -> dict[str, str]:
    return {
        "name": model.name,
        "state": f"{model.state}: {model.state_detail}" if model.state_detail else model.state,
        "parameters": f"{model.parameters:,}",
        "weights": model.weights,
        "context": str(model.context_length),
        "attention": ", ".join(model.mechanisms),
        "source": model.source,
    }
