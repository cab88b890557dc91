"""`attn jobs`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.output import print_json, print_table
from google.protobuf.json_format import MessageToDict

from attn_client.commands.follow import follow
from attn_client.commands.options import Json, connect
from attn_client.results.jobs import Job

app = typer.Typer(no_args_is_help=True, help="The training jobs of a server.")
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job; see `attn jobs list`.")]


@app.command("list")
@with_flags
def list_command(*, json: Json = False, connection: ConnectionOptions) -> None:
    """List jobs, newest first."""
    with connect(connection) as client:
        jobs = client.jobs.list()
    if json:
        for job in jobs:
            print_json(facts(job))
    else:
        print_table([_row(job) for job in jobs], "no job yet; start one with: attn train")


@app.command("show")
@with_flags
def show_command(*, job: JobId, connection: ConnectionOptions) -> None:
    """Show all of a job, as JSON."""
    with connect(connection) as client:
        print_json(facts(client.jobs.get(job)))


@app.command("watch")
@with_flags
def watch_command(
    *,
    job: JobId,
    after: Annotated[int, typer.Option(help="Show only events with a higher id.", min=0)] = 0,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Follow a job until it ends; a broken connection is made again. Ctrl-C leaves the job running."""
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
    """Ask a job to stop."""
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
    """Start a failed or cancelled job again from its newest checkpoint."""
    with connect(connection) as client:
        resumed = client.jobs.resume(job)
        if detach:
            typer.echo(f"{job} is {resumed.state}")
        else:
            follow(client, job, after=resumed.last_event_id, json=False)


def facts(job: Job) -> dict[str, Any]:
    """A job for programs."""
    return {
        "id": job.id,
        "state": job.state,
        "attempt": job.attempt,
        "step": job.step,
        "steps": job.steps,
        "metrics": dict(job.metrics),
        "error": job.error.message if job.error else None,
        "created": job.created.isoformat() if job.created else None,
        "ended": job.ended.isoformat() if job.ended else None,
        "last_event_id": job.last_event_id,
        "model_path": job.model_path or None,
        "spec": MessageToDict(job.spec, preserving_proto_field_name=True),
    }


def _row(job: Job) -> dict[str, str]:
    loss = job.metrics.get("validation_loss", job.metrics.get("loss"))
    return {
        "job": job.id,
        "state": job.state,
        "steps": f"{job.step}/{job.steps}",
        "loss": "" if loss is None else f"{loss:.4f}",
        "attention": job.spec.model.mechanism.name,
        "created": f"{job.created:%Y-%m-%d %H:%M}" if job.created else "",
    }
