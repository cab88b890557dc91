"""`attn train`."""

from __future__ import annotations

from typing import Annotated

import typer
from attn.v1 import common_pb2
from attn.v1 import training_pb2 as pb
from attn_core.errors import InvalidValue
from attn_core.options import parse_options
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.output import print_json
from google.protobuf import struct_pb2

from attn_client.client import Client
from attn_client.commands.changes import Changes, changed, data_source, set_fields
from attn_client.commands.follow import follow
from attn_client.commands.options import Json, connect
from attn_client.recipe import read_recipe, recipe_names
from attn_client.results.jobs import Job

Option = typer.Option
MODEL, DATA, OPTIMISER, RUN = "Model", "Data", "Optimiser", "Run"
OF_DECODERS = (
    *("layers", "heads", "kv_heads", "width", "context", "norm", "activation", "positions", "lenders"),
    *("dropout", "attention_dropout", "experts", "experts_per_token", "routing", "balance"),
)
"""Arguments that describe a decoder, which a recipe does for itself."""
USUAL = {"steps": 2000, "batch_size": 12, "learning_rate": 1e-3}
"""Of the optimiser, without a recipe."""


@with_flags
def train_command(  # noqa: PLR0913 - a command has the options it has
    line: typer.Context,
    *,
    data: Annotated[
        str, Option(help="Data set by name, or a text file or folder on the server.", rich_help_panel=DATA)
    ] = "",
    recipe: Annotated[str, Option(help=f"Start from a recipe, {', '.join(recipe_names())}, or a TOML file.")] = "",
    languages: Annotated[str, Option(help="Of a folder of pairs: from-to, such as en-de.", rich_help_panel=DATA)] = "",
    attention: Annotated[
        str, Option(help="Mechanism, mha or the recipe's; see `attn list mechanisms`.", rich_help_panel=MODEL)
    ] = "",
    option: Annotated[
        list[str] | None,
        Option("--option", "-o", metavar="NAME=VALUE", help="Option of the mechanism.", rich_help_panel=MODEL),
    ] = None,
    layers: Annotated[int, Option(help="Blocks.", rich_help_panel=MODEL)] = 4,
    heads: Annotated[int, Option(help="Query heads.", rich_help_panel=MODEL)] = 4,
    kv_heads: Annotated[int, Option(help="Key/value heads; 0 is as many.", rich_help_panel=MODEL)] = 0,
    width: Annotated[int, Option(help="Size of the residual stream.", rich_help_panel=MODEL)] = 128,
    context: Annotated[int, Option(help="Tokens seen at once.", rich_help_panel=MODEL)] = 64,
    norm: Annotated[str, Option(help="layernorm or rmsnorm.", rich_help_panel=MODEL)] = "",
    activation: Annotated[str, Option(help="gelu or swiglu.", rich_help_panel=MODEL)] = "",
    positions: Annotated[str, Option(help="learned, rotary or none.", rich_help_panel=MODEL)] = "",
    dropout: Annotated[float, Option(help="Probability of dropping activations.", rich_help_panel=MODEL)] = 0.0,
    attention_dropout: Annotated[
        float, Option(help="Probability of dropping attention weights.", rich_help_panel=MODEL)
    ] = 0.0,
    experts: Annotated[int, Option(help="Feed-forwards of each block; 0 is one.", rich_help_panel=MODEL)] = 0,
    experts_per_token: Annotated[int, Option(help="Experts that a token uses.", rich_help_panel=MODEL)] = 0,
    routing: Annotated[str, Option(help="mixtral, switch, deepseek_v2 or deepseek_v3.", rich_help_panel=MODEL)] = "",
    balance: Annotated[
        float, Option(help="Weight of the loss that keeps all experts busy.", rich_help_panel=MODEL)
    ] = 0.0,
    lenders: Annotated[
        str,
        Option(
            help="Layers that share keys and values: cla:N, N neighbours; yoco, the upper half.", rich_help_panel=MODEL
        ),
    ] = "",
    model_option: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Another field of the model's config.", rich_help_panel=MODEL),
    ] = None,
    tokenizer: Annotated[str, Option(help="character, or a tokenizer on the server.", rich_help_panel=DATA)] = "",
    steps: Annotated[int | None, Option(help="Updates; 2000, or the recipe's.", rich_help_panel=OPTIMISER)] = None,
    batch: Annotated[
        int | None, Option(help="Sequences a step; 12, or the recipe's.", rich_help_panel=OPTIMISER)
    ] = None,
    learning_rate: Annotated[
        float | None,
        Option("--learning-rate", "--lr", help="Highest; 0.001, or the recipe's.", rich_help_panel=OPTIMISER),
    ] = None,
    min_learning_rate: Annotated[float | None, Option(help="Last.", rich_help_panel=OPTIMISER)] = None,
    warmup: Annotated[int | None, Option(help="Steps of warm-up.", rich_help_panel=OPTIMISER)] = None,
    weight_decay: Annotated[float | None, Option(help="Of matrices.", rich_help_panel=OPTIMISER)] = None,
    precision: Annotated[
        str, Option(help="Of linear layers in updates: float32 or bfloat16.", rich_help_panel=OPTIMISER)
    ] = "",
    seed: Annotated[int, Option(help="Fixes weights, data order and dropout.", rich_help_panel=OPTIMISER)] = 0,
    checkpoint_every: Annotated[
        int | None, Option(help="Steps; 0 leaves it to the server.", rich_help_panel=RUN)
    ] = None,
    evaluate_every: Annotated[int | None, Option(help="Steps; 0 leaves it to the server.", rich_help_panel=RUN)] = None,
    job: Annotated[str, Option(help="Id for the job; the server chooses one if not given.", rich_help_panel=RUN)] = "",
    detach: Annotated[
        bool, Option("--detach", help="Print the job's id and do not follow it.", rich_help_panel=RUN)
    ] = False,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Train a model on the server and watch it. The job goes on if this command ends; Ctrl-C leaves it running.

    Examples: `attn train --attention gqa --kv-heads 2 --data shakespeare`, `attn train --recipe rnnsearch --batch 16`.
    A recipe describes its model; --attention with its options and --model-option change it. Fields of the config that
    have no option here are given by name, too: `--model-option 'pattern=["linear", "mha"]'`.
    """
    optimizer = {
        "steps": steps,
        "batch_size": batch,
        "learning_rate": learning_rate,
        "min_learning_rate": min_learning_rate,
        "warmup_steps": warmup,
        "weight_decay": weight_decay,
    }
    policy = {"interval_steps": checkpoint_every, "evaluation_interval_steps": evaluate_every}
    if recipe:
        _require_of_recipe(line)
        given = Changes(
            data=data,
            tokenizer=tokenizer,
            languages=languages,
            seed=seed,
            precision=precision,
            attention=attention,
            options=option or (),
            fields=model_option or (),
            optimizer=optimizer,
            checkpoint=policy,
        )
        spec = changed(read_recipe(recipe), given)
    else:
        model = pb.ModelConfig(
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            context_length=context,
            mechanism=mechanism_of(attention, option),
            norm=norm,
            activation=activation,
            positions=positions,
            dropout=dropout,
            experts=experts,
            experts_per_token=experts_per_token,
            routing=routing,
            balance=balance,
            family_options=others(model_option, kv_sharing=lenders, attention_dropout=attention_dropout),
        )
        source = data_source(data, tokenizer, languages)
        spec = pb.TrainingSpec(model=model, data=source, seed=seed, precision=precision)
        set_fields(spec.optimizer, USUAL)
        set_fields(spec.optimizer, optimizer)
        set_fields(spec.checkpoint, policy)
    with connect(connection) as client:
        submitted = client.jobs.submit(spec, job_id=job)
        _tell(client, submitted, detach=detach, json=json)


def _tell(client: Client, job: Job, *, detach: bool, json: bool) -> None:
    if not detach:
        follow(client, job.id, after=0, json=json)
    elif json:
        print_json({"job": job.id, "state": job.state})
    else:
        typer.echo(job.id)


def _require_of_recipe(line: typer.Context) -> None:
    for name in OF_DECODERS:
        source = line.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            allowed = "left out with --recipe; --model-option NAME=VALUE changes its model"
            raise InvalidValue.of(option, line.params[name], allowed)


def mechanism_of(attention: str, options: list[str] | None) -> common_pb2.MechanismRef:
    """The mechanism with its options NAME=VALUE; mha where there is none."""
    mechanism = common_pb2.MechanismRef(name=attention or "mha")
    mechanism.options.update(parse_options(options))
    return mechanism


def others(pairs: list[str] | None, **given: str | float) -> struct_pb2.Struct | None:
    """Fields of a decoder that have none of their own on the wire, of pairs and those `given`; None for none."""
    values = parse_options(pairs, "--model-option") | {name: value for name, value in given.items() if value}
    if not values:
        return None
    fields = struct_pb2.Struct()
    fields.update(values)
    return fields
