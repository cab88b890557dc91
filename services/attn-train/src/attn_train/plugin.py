"""The attn plugin of this package: its service and commands. Importing it imports neither torch nor Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from attn_core.plugins.hooks import Command, NamedDataset, Reward, hookimpl
from attn_schema import DeviceConfig
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json, waiting

if TYPE_CHECKING:
    from attn_gateway import Cluster
    from attn_gateway.service import Service


@hookimpl
def attn_services(cluster: Cluster) -> list[Service]:
    """Return the TrainingService."""
    from attn_train.service import TrainingGrpc

    return [TrainingGrpc(cluster)]


@hookimpl
def attn_datasets() -> list[NamedDataset]:
    """Return the synthetic tasks and what is included."""
    from attn_train.data.images import DIGITS
    from attn_train.data.labels import INCLUDED as LABELLED
    from attn_train.data.pairs import INCLUDED
    from attn_train.data.synthetic import TASKS

    images = NamedDataset(name=DIGITS, kind="images", summary="handwritten digits of 8 x 8 pixels")
    others = [("pairs", TASKS | INCLUDED), ("labels", LABELLED)]
    return [images, *(NamedDataset(name=n, kind=k, summary=what) for k, own in others for n, what in own.items())]


@hookimpl
def attn_rewards() -> list[Reward]:
    """Return the verifiers of answers."""
    numbers = "1 if the last number, or the one that is boxed or behind ####, is that of the column answer"
    return [
        Reward(name="accuracy", summary=numbers, target="attn_train.verifiers:accuracy"),
        Reward(
            name="json_schema",
            summary="1 if the completion is JSON that the schema of the column schema accepts",
            target="attn_train.verifiers:json_schema",
        ),
        Reward(
            name="regex",
            summary="1 if the regular expression of the column pattern matches the whole completion",
            target="attn_train.verifiers:regex",
        ),
    ]


@hookimpl
def attn_commands() -> list[Command]:
    """Return `attn data`, `attn evaluate`, and the command that `attn compare --train` calls."""
    return [
        Command(
            name="compare-training",
            summary="Train mechanisms with equal budgets and compare them; same as compare --train.",
            target="attn_train.comparison.command:compare_training_command",
        ),
        Command(
            name="data",
            summary="Prepare training data that does not fit into memory, and inspect it.",
            target="attn_train.data.token_shards.command:app",
        ),
        Command(
            name="evaluate",
            summary="Evaluate a model on data: perplexity or accuracy.",
            target="attn_train.plugin:evaluate_command",
        ),
    ]


@with_flags
def evaluate_command(
    *,
    model: Annotated[str, typer.Argument(help="Name of a model on this machine, or a model folder.")],
    dataset: Annotated[
        str, typer.Option(help="Data: a text, a .conllu or .tsv file, an image folder or .npz file, or a dataset name.")
    ],
    json: Json = False,
    engine: DeviceConfig,
) -> None:
    """Evaluate a model on your data, on this machine: perplexity or accuracy.

    Examples: `attn evaluate smollm2-135m-instruct --dataset mine.txt`, `attn evaluate vit-1a2b3c4d --dataset digits`,
    `attn evaluate folder --dataset test.conllu --device cuda`.
    """
    from attn_models.sources.store import ModelStore
    from attn_schema.home import home_folder

    folder = ModelStore().find(model)
    with waiting(f"evaluating {model}"):
        from attn_train.evaluation import evaluate

        found = evaluate(folder, dataset, home_folder(), engine)
    if json:
        print_json(found)
    else:
        typer.echo("\n".join(f"{name:16} {value:.6g}" for name, value in found.items()))
