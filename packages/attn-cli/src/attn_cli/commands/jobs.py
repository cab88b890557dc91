"""`attn jobs`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json, print_table, significant
from attn_schema.training import JobEvent, TrainingJob

from attn_cli.commands.follow import follow
from attn_cli.commands.options import connect
from attn_cli.curves import curve_of, drawn, read_curve
from attn_cli.output import print_facts

if TYPE_CHECKING:
    from attn_client import Client

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The training jobs of a server.")
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job; see `attn jobs list`.")]


@app.command("list")
@with_flags
def list_command(*, json: Json = False, connection: ConnectionOptions) -> None:
    """List jobs, newest first."""
    with connect(connection) as client:
        jobs = client.jobs.list()
    if json:
        print_json(jobs)
    else:
        print_table([_row(job) for job in jobs], "no job yet; start one with: attn train")


@app.command("show")
@with_flags
def show_command(*, job: JobId, json: Json = False, connection: ConnectionOptions) -> None:
    """Show a job: its state, its newest metrics, and what its config gives."""
    with connect(connection) as client:
        found = client.jobs.get(job)
    if json:
        print_json(found)
    else:
        print_facts({name: value for name, value in _row(found).items() if value} | _given(msgspec.to_builtins(found)))


@app.command("watch")
@with_flags
def watch_command(
    *,
    job: JobId,
    after: Annotated[int, typer.Option(help="Show only events with a higher id.", min=0)] = 0,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Follow a job until it ends, reconnecting if the connection breaks. Ctrl-C leaves the job running."""
    with connect(connection) as client:
        follow(client, job, after=after, json=json)


@app.command("cancel")
@with_flags
def cancel_command(
    *,
    job: JobId,
    discard: Annotated[bool, typer.Option("--discard", help="Stop without a last checkpoint.")] = False,
    connection: ConnectionOptions,
) -> None:
    """Cancel a job. It writes a last checkpoint before it stops, unless `--discard` is given."""
    with connect(connection) as client:
        typer.echo(f"{job} is {client.jobs.cancel(job, discard=discard).state}")


@app.command("resume")
@with_flags
def resume_command(
    *,
    job: JobId,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow it.")] = False,
    connection: ConnectionOptions,
) -> None:
    """Restart a failed or cancelled job from its newest checkpoint."""
    with connect(connection) as client:
        resumed = client.jobs.resume(job)
        if detach:
            typer.echo(f"{job} is {resumed.state}")
        else:
            follow(client, job, after=resumed.last_event_id, json=False)


@app.command("rm")
@with_flags
def rm_command(
    *,
    job: JobId,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop it first if it has not ended.")] = False,
    connection: ConnectionOptions,
) -> None:
    """Delete a job that has ended: its record, events, checkpoints and other files. Its finished model is kept."""
    with connect(connection) as client:
        model = client.jobs.delete(job, cancel=cancel)
    typer.echo(f"{job} is deleted" + (f"; its model stays in {model}" if model else ""))


@app.command("metrics")
@with_flags
def metrics_command(*, job: JobId, connection: ConnectionOptions) -> None:
    """Print a job's metrics so far as JSON lines, one for each measured step, as in its metrics.jsonl."""
    with connect(connection) as client:
        for row in _measured(client, job):
            print_json(row)


@app.command("plot")
@with_flags
def plot_command(
    *,
    job: JobId,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB|FILE",
            help="Another run, drawn beside it; may be repeated: a job, transformers' trainer_state.json, a .csv with "
            "the columns step and loss, or a job's metrics.jsonl.",
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="The metric that is drawn; see `attn jobs metrics`.")] = "loss",
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Draw the curve of a job's loss so far, beside those of other runs, in characters."""
    stored = {name: read_curve(Path(name), metric) for name in beside or () if "." in name or "/" in name}
    with connect(connection) as client:
        curves = [
            stored.get(name) or curve_of(name, metric, list(_measured(client, name)), "--metric")
            for name in (job, *(beside or ()))
        ]
    if json:
        print_json([{"name": curve.name, "points": curve.points} for curve in curves])
    else:
        width, height = shutil.get_terminal_size()
        typer.echo(drawn(curves, max(20, width - 12), min(20, max(5, height - len(curves) - 4))))


def _measured(client: Client, job: str) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a job so far, each step once."""
    last, end = -1, client.jobs.get(job).last_event_id
    with closing(client.jobs.watch(job)) as updates:
        for update in updates if end else ():
            if not isinstance(update, JobEvent):
                continue
            found = update.metrics
            if found is not None and found.step > last:
                last = found.step
                yield {"event": update.id, "attempt": update.attempt, "step": found.step} | found.values
            if update.id >= end:
                break


def _given(values: dict[str, Any], within: str = "") -> dict[str, Any]:
    """The values that are not empty by their paths, such as config.data.dataset."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _given(value, f"{within}{name}.")
        elif value not in (None, [], ""):
            found[f"{within}{name}"] = value
    return found


def _row(job: TrainingJob) -> dict[str, str]:
    losses = (job.last_metrics.get(name) for name in ("loss", "validation_loss"))
    loss, validation = ("" if value is None else significant(value) for value in losses)
    return {
        "job": job.id,
        "state": f"{job.state}, {job.queue_position}." if job.queue_position else job.state,
        "priority": str(job.priority),
        "steps": f"{job.step}/{job.config.optimizer.steps}",
        "loss": loss,
        "validation loss": validation,
        "model": job.config.model.label,
        "why": job.error.message if job.error else job.waiting_for,
        "created": f"{job.create_time:%Y-%m-%d %H:%M}" if job.create_time else "",
    }
