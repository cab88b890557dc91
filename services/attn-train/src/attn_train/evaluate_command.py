"""`attn evaluate`. Torch is imported only where a model runs."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer


def evaluate_command(
    model: Annotated[str, typer.Argument(help="A trained model of this machine by name, or its folder.")],
    data: Annotated[str, typer.Option(help="A .npz file or folder of images, a treebank, a text, or a name.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,  # noqa: FBT002
) -> None:
    """Measure a model on data of yours, here: perplexity, images named, words tagged or masked tokens guessed.

    Examples: `attn evaluate smollm2-135m-instruct --data mine.txt`, `attn evaluate vit-1a2b3c4d --data digits`,
    `attn evaluate folder --data test.conllu`.
    """
    from attn_models.sources.store import ModelStore
    from attn_schema.home import home_folder

    from attn_train.evaluation import evaluate

    found = evaluate(ModelStore().find(model), data, home_folder())
    typer.echo(dumps(found) if json else "\n".join(f"{name:14} {value:.4f}" for name, value in found.items()))
