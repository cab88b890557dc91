"""`attn train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from attn_schema import ConnectionOptions
from attn_schema.estimate import JobEstimate
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json, print_table, waiting
from attn_schema.prepared import PreparedSource
from attn_schema.training import TrainingConfig

from attn_cli.commands.follow import follow
from attn_cli.commands.options import connect
from attn_cli.recipe import located, recipe_names, recipe_under


@with_flags(top="training", defaults=recipe_under)
def train_command(
    *,
    training: TrainingConfig,
    recipe: Annotated[  # noqa: ARG001 - `recipe_under` reads it
        str, typer.Option(help=f"Start from a recipe: {', '.join(recipe_names())}, or a TOML file.")
    ] = "",
    job: Annotated[str, typer.Option(help="Id for the job; the server chooses one if not given.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id and do not follow it.")] = False,
    priority: Annotated[
        int,
        typer.Option(
            help="Jobs of a higher priority start first and preempt running ones of a lower; above 0 for admins."
        ),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the FLOPs, memory, disk and time that the job would need; start nothing."),
    ] = False,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Train a model on the server and follow the job. It continues on the server if this command ends, also at Ctrl-C.

    Examples: `attn train --mechanism gqa --num-kv-heads 2 --dataset shakespeare`, `attn train --recipe rnnsearch
    --batch-size 16`, `attn train --from smollm2-135m-instruct --lora-rank 8 --dataset my.txt`. Options override a
    recipe. Fields of the model's config without an option of their own are given by name: `--model-options
    'pattern=["linear", "mha"]'`.
    """
    data, model = training.data, training.model
    config = training.replace(
        data=data.replace(dataset=located(data.dataset), prepared=_mixture(data.sources)),
        model=model.replace(base_model=_folder(model.base_model)),
    )
    with connect(connection) as client:
        if dry_run:
            with waiting("estimating the job"):
                estimate = client.jobs.estimate(config, job_id=job)
            show_estimate(estimate, json=json)
            return
        submitted = client.jobs.submit(config, job_id=job, priority=priority)
        if not detach:
            follow(client, submitted.id, after=0, json=json)
        elif json:
            print_json({"id": submitted.id, "state": submitted.state})
        else:
            typer.echo(submitted.id)


def show_estimate(estimate: JobEstimate, *, json: bool) -> None:
    """Print the estimated cost of a job, as text or as JSON."""
    if json:
        print_json(estimate)
        return
    found = estimate
    memory = {
        "weights": found.weight_bytes,
        "gradients": found.gradient_bytes,
        "optimizer": found.optimizer_bytes,
        "activations": found.activation_bytes,
        "process": found.process_bytes,
    }
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in memory.items())
    time = f"{timedelta(seconds=round(found.seconds))} of training, {found.seconds_per_step:.3g} s a step"
    rows = {
        "runs": f"{found.workers} worker{'s' * (found.workers > 1)} on {found.device}, {found.steps} steps",
        "batch": f"{found.sequences_per_step} sequences, {found.tokens_per_step:,.0f} tokens",
        "tokens": f"{found.steps * found.tokens_per_step:,.0f}",
        "parameters": f"{found.parameters:,}, of which {found.trained_parameters:,} are trained",
        "FLOPs": f"{found.flops:.4g}"
        + (f", of allowed pairs alone {found.allowed_flops:.4g}" if found.allowed_flops else ""),
        "memory": f"{_bytes(found.memory_bytes)} a worker: {parts}",
        "checkpoints": f"{found.checkpoints} of {_bytes(found.checkpoint_bytes)}",
        "disk": f"{_bytes(found.disk_bytes)} at most",
        "time": time if found.seconds else "not known",
        "found by": found.timed,
    }
    print_table([{"": name, "estimate": text} for name, text in rows.items()], "")


def _bytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def _mixture(sources: Sequence[PreparedSource]) -> str:
    """The text form of a mixture of prepared folders, with absolute paths for the server."""
    absolute = (replace(source, path=str(Path(source.path).expanduser().absolute())) for source in sources)
    return ",".join(source.text for source in absolute)


def _folder(name: str | None) -> str | None:
    """The absolute path, for the server, if `name` is a folder on this machine; any other name is returned as given."""
    return str(Path(name).expanduser().resolve()) if name and Path(name).expanduser().is_dir() else name
