"""`attn train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json
from attn_schema.prepared import PreparedSource
from attn_schema.training import TrainingConfig

from attn_client.commands.follow import follow
from attn_client.commands.options import connect
from attn_client.recipe import located, recipe_names, recipe_under


@with_flags(top="training", defaults=recipe_under)
def train_command(
    *,
    training: TrainingConfig,
    recipe: Annotated[  # noqa: ARG001 - `recipe_under` reads it
        str, typer.Option(help=f"Start from a recipe: {', '.join(recipe_names())}, or a TOML file.")
    ] = "",
    job: Annotated[str, typer.Option(help="Id for the job; the server chooses one if not given.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not follow it.")] = False,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Train a model on the server and watch it. The job goes on if this command ends; Ctrl-C leaves it running.

    Examples: `attn train --mechanism gqa --num-kv-heads 2 --dataset shakespeare`, `attn train --recipe rnnsearch
    --batch-size 16`, `attn train --from smollm2-135m-instruct --lora-rank 8 --dataset my.txt`. Options change a recipe.
    Fields of the model's config that have no option are given by name: `--model-options 'pattern=["linear", "mha"]'`.
    """
    data, model = training.data, training.model
    config = training.replace(
        data=data.replace(dataset=located(data.dataset), prepared=_mixture(data.sources)),
        model=model.replace(base_model=_folder(model.base_model)),
    )
    with connect(connection) as client:
        submitted = client.jobs.submit(config, job_id=job)
        if not detach:
            follow(client, submitted.id, after=0, json=json)
        elif json:
            print_json({"id": submitted.id, "state": submitted.state})
        else:
            typer.echo(submitted.id)


def _mixture(sources: Sequence[PreparedSource]) -> str:
    """Folders of prepared data as the server needs them."""
    absolute = (replace(source, path=str(Path(source.path).expanduser().absolute())) for source in sources)
    return ",".join(source.text for source in absolute)


def _folder(name: str | None) -> str | None:
    """A folder of this machine as an absolute path, as the server needs it; a name as it is."""
    return str(Path(name).expanduser().resolve()) if name and Path(name).expanduser().is_dir() else name
