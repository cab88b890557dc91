"""`attn models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import typer
from attn_core import installed
from attn_core.errors import InvalidValue, MissingPackage, UnknownName
from attn_schema import ConnectionOptions, DeploymentConfig, EngineConfig, ModelInfo
from attn_schema.flags import with_flags
from attn_schema.output import Json, note, print_json, print_table
from typer.core import TyperGroup

from attn_cli.commands.options import connect
from attn_cli.main import load


class ModelGroup(TyperGroup):
    """The group of `attn models`, which also has `attn pull` as `attn models pull`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None for an unknown one."""
        if cmd_name == PULL and PULL in installed().commands.names():
            return load(installed().commands.get(PULL))
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return [*super().list_commands(ctx), *([PULL] if PULL in installed().commands.names() else [])]


PULL = "pull"
app = typer.Typer(
    cls=ModelGroup, add_completion=False, no_args_is_help=True, help="The models of a server, and of this machine."
)


@app.command("list")
@with_flags
def list_command(*, json: Json = False, connection: ConnectionOptions) -> None:
    """List the models that the server has loaded."""
    with connect(connection) as client:
        models = client.models.list()
    if json:
        print_json(models)
    else:
        print_table([_row(model) for model in models], "no model is loaded; load one with: attn models load NAME")


@app.command("load")
@with_flags
def load_command(
    *,
    name: Annotated[str, typer.Argument(help="Name that requests will use.")],
    source: Annotated[str, typer.Argument(help="Folder on the server, registered name, or id of a finished job.")] = "",
    base_model: Annotated[
        str, typer.Option(help="For a LoRA adapter: the loaded model that it is for, if the adapter does not say.")
    ] = "",
    engine: EngineConfig,
    deployment: DeploymentConfig,
    connection: ConnectionOptions,
) -> None:
    """Load a model, or a LoRA adapter on a model; returns once it answers requests.

    Example: `attn models load chat ./model`
    """
    # The server has another working directory, so local paths are made absolute.
    folder, draft = (
        str(Path(text).resolve()) if text and Path(text).exists() else text for text in (source, engine.draft_model)
    )
    with connect(connection) as client:
        model = client.models.load(
            name,
            folder or "",
            engine=engine.replace(draft_model=draft),
            base_model=base_model,
            deployment=deployment,
        )
    typer.echo(f"{model.name} is {model.state}: {model.num_parameters:,} parameters, max_seq_len {model.max_seq_len}")
    if model.note:
        note(f"attn: {model.note}")


@app.command("scale")
@with_flags
def scale_command(
    *,
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    number: Annotated[int | None, typer.Argument(help="Number of engines.", metavar="N")] = None,
    deployment: DeploymentConfig,
    connection: ConnectionOptions,
) -> None:
    """Change the number of engines that serve a model; running requests are not interrupted.

    Example: `attn models scale chat 3`, or `attn models scale chat --min-replicas 0 --max-replicas 4`
    """
    if number is not None:
        if deployment.replicas not in (None, number):
            raise InvalidValue.of("replicas", deployment.replicas, f"left out with N, which is {number}")
        # Construct a new object, because `replace` does not validate.
        deployment = DeploymentConfig(**msgspec.structs.asdict(deployment) | {"replicas": number})
    with connect(connection) as client:
        model = client.models.scale(name, deployment)
    typer.echo(f"{model.name} is {model.state}: {model.replicas} engines")


@app.command("sleep")
@with_flags
def sleep_command(
    *,
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests may take to finish; 0 aborts them.")
    ] = None,
    connection: ConnectionOptions,
) -> None:
    """Free the memory of a model, weights and KV cache, until it is woken up."""
    with connect(connection) as client:
        model = client.models.sleep(name, shutdown_timeout=shutdown_timeout)
    typer.echo(f"{model.name} is {model.state}")


@app.command("wake")
@with_flags
def wake_command(
    *, name: Annotated[str, typer.Argument(help="Name of the model.")], connection: ConnectionOptions
) -> None:
    """Load a sleeping model again, with the weights that it had."""
    with connect(connection) as client:
        model = client.models.wake_up(name)
    typer.echo(f"{model.name} is {model.state}")


@app.command("unload")
@with_flags
def unload_command(
    *,
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running requests may take to finish.")
    ] = None,
    connection: ConnectionOptions,
) -> None:
    """Unload a model."""
    with connect(connection) as client:
        client.models.unload(name, shutdown_timeout=shutdown_timeout)
    typer.echo(f"{name} is unloaded")


@app.command("local")
def local_command(*, json: Json = False) -> None:
    """List the models on this machine: pulled, converted or trained ones, and incomplete downloads."""
    models = _store().models()
    if json:
        print_json([_local_facts(model) for model in models])
        return
    rows = [
        {
            "name": model.name,
            "size": f"{model.nbytes / 1e6:.1f} MB",
            "family": model.family,
            "from": model.origin,
            "state": "" if model.complete else "incomplete",
        }
        for model in models
    ]
    print_table(rows, "no model is on this machine; fetch one with: attn pull NAME")


def _local_facts(model: LocalModel) -> dict[str, Any]:
    facts = {"name": model.name, "path": str(model.path), "bytes": model.nbytes, "family": model.family}
    return facts | {"origin": model.origin, "complete": model.complete}


@app.command("rm")
def rm_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names, as `attn models local` lists them.")],
) -> None:
    """Delete models from this machine, including incomplete downloads."""
    store = _store()
    known = [model.name for model in store.models()]
    for name in names:  # check all names first, so that all or none are deleted
        if name not in known:
            raise UnknownName.of("model on this machine", name, known)
    for name in dict.fromkeys(names):
        typer.echo(f"{name} is removed, {store.remove(name) / 1e6:.1f} MB are free again")


@app.command("export")
def export_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `attn models local` lists, or a folder.")],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="The folder or file to write; by default named as the model."),
    ] = None,
    to: Annotated[str, typer.Option(help="hf (a folder for transformers), gguf, onnx or safetensors.")] = "hf",
    quantization: Annotated[
        str | None,
        typer.Option(help="Type of GGUF matrices: f32, f16 (the default), q8_0, q6_k, q5_k or q4_k."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file or model folder at OUT.")] = False,
    json: Json = False,
) -> None:
    """Write a model for other programs, such as transformers, vLLM and llama.cpp, which then compute the same.

    The weights are written in the published layout (llama, qwen3, gpt2, ...) that expresses the model exactly; if none
    does, the fields that differ are named.

    Examples: `attn models export shakespeare`, `attn models export shakespeare --to gguf --quantization q8_0`
    """
    _answer(_store().export(model, target, to, quantization=quantization, overwrite=overwrite), json=json)


@app.command("quantize")
def quantize_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `attn models local` lists, or a folder.")],
    text: Annotated[Path, typer.Option(help="A text like those that the model will read; its last fifth is judged.")],
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="The folder or file to write; by default named as the model."),
    ] = None,
    to: Annotated[
        str, typer.Option(help="gptq or awq (a folder), q4_k, q5_k or q6_k (a GGUF file with an importance matrix).")
    ] = "q4_k",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file or model folder at OUT.")] = False,
    json: Json = False,
) -> None:
    """Store the weights of a model in fewer bits, with the errors where a text needs the weights least.

    Prints the type of each kind of matrix, and the perplexity of the text's last fifth before and after.

    Example: `attn models quantize smollm2-135m-instruct --text play.txt --to gptq`
    """
    _answer(_store().quantize(model, target, to, text, overwrite=overwrite), json=json)


def _answer(done: dict[str, Any], *, json: bool) -> None:
    """Print where a written model is, its layout, the types of its matrices and its perplexities."""
    if json:
        print_json({**done, "path": str(done["path"])})
        return
    typer.echo(f"{done['path']} ({done['layout']})" if done["layout"] else str(done["path"]))
    kinds: dict[str, list[str]] = {}
    for kind, found in done["types"].items():
        kinds.setdefault(found, []).append(kind)
    for found, names in kinds.items():
        typer.echo(f"{found}: {', '.join(names)}")
    if "perplexity_before" in done:
        typer.echo(f"perplexity {done['perplexity_before']:.4f} -> {done['perplexity_after']:.4f}")


@app.command("check")
def check_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model of this machine, a folder, a GGUF file, or OWNER/REPO.")
    ],
    json: Json = False,
) -> None:
    """Say whether and how a model would load, from its config and the headers of its files alone.

    Prints family, size, cache, the fastest decoding that memory allows, and whose tokens it gets; of a repository no
    weights are fetched. The exit code is 1 if it would not load.

    Examples: `attn models check HuggingFaceTB/SmolLM2-135M-Instruct`, `attn models check model.gguf`
    """
    checked = _store().check(model)
    if json:
        print_json(asdict(checked))
    else:
        typer.echo("\n".join(f"{name:<11} {said}" for name, said in checked.rows().items()))
    if checked.refused is not None:
        raise typer.Exit(1)


app.command("show", help="The same as `attn models check`, for a model of this machine.")(check_command)


class LocalStore(Protocol):
    """The store of the models on this machine."""

    def check(self, model: str) -> Any:
        """What is known of a model before it is loaded: a dataclass with `refused`, and `rows()` for people."""
        ...

    def models(self) -> Sequence[LocalModel]:
        """All models, sorted by name."""
        ...

    def export(
        self, model: str, target: Path | None, to: str, *, quantization: str | None, overwrite: bool
    ) -> dict[str, Any]:
        """Write a model for other programs; returns `path`, `layout` (or architecture) and `types` of matrices."""
        ...

    def quantize(self, model: str, target: Path | None, method: str, text: Path, *, overwrite: bool) -> dict[str, Any]:
        """Quantise a model; returns what `export` does, and `perplexity_before` and `perplexity_after`."""
        ...

    def remove(self, name: str) -> int:
        """Delete the model of this name; returns the number of bytes freed."""
        ...


class LocalModel(Protocol):
    """A model on this machine; `nbytes` is its size on disk, `origin` a text that describes where it came from."""

    name: str
    path: Path
    nbytes: int
    family: str
    origin: str
    complete: bool


def _store() -> LocalStore:
    """The store of the first plugin that provides one; raises `MissingPackage` if none does."""
    for _, open_store in installed().offers("attn_local_stores"):
        store: LocalStore = open_store()
        return store
    raise MissingPackage.of("attn-models", "the models of this machine")


def _row(model: ModelInfo) -> dict[str, str]:
    return {
        "name": model.name,
        "state": f"{model.state}: {model.state_detail}" if model.state_detail else model.state,
        "engines": str(model.replicas),
        "parameters": f"{model.num_parameters:,}",
        "quantization": model.quantization,
        "max_seq_len": str(model.max_seq_len),
        "attention": ", ".join(model.mechanisms),
        "source": f"{model.source} on {model.base_model}" if model.base_model else model.source,
    }
