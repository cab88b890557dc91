"""Display of a running job: a progress bar on a terminal, plain lines otherwise, or JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import typer
from attn_schema.output import note, print_json, significant
from attn_schema.training import Checkpoint, JobEvent, JobState, LogLine, Metrics, StateChange, TrainingJob
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

if TYPE_CHECKING:
    from attn_client import Client

SHOWN = {
    "loss": "loss {}",
    "validation_loss": "validation {}",
    "validation_left_out": "{:.0f} left out of validation",
    "reward": "reward {}",
    "validation_reward": "validation reward {}",
    "reward_accuracy": "reward accuracy {:.1%}",
    "learning_rate": "rate {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "answer_accuracy": "answer accuracy {:.1%}",
    "masked_accuracy": "masked accuracy {:.1%}",
    "accuracy": "accuracy {:.1%}",
}
"""The metrics that are displayed, and their formats; {} is for `significant` digits."""
CLASSIFICATION = "accuracy"
"""The metric that marks a job that trained a classifier, a model that cannot be served."""


class View(Protocol):
    """Displays a job and its events."""

    def show(self, update: TrainingJob | JobEvent) -> None:
        """Display one update."""
        ...


def follow(client: Client, job_id: str, *, after: int, json: bool) -> TrainingJob:
    """Display a job until it ends, and return it; raises its error if it failed, `typer.Exit` if it was cancelled."""
    try:
        with _view(json=json) as view, closing(client.jobs.watch(job_id, after=after)) as updates:
            for update in updates:
                view.show(update)
    except KeyboardInterrupt:
        message = f"{job_id} goes on; follow it with: attn jobs watch {job_id}, stop it with: attn jobs cancel {job_id}"
        note(f"\nattn: {message}")
        raise
    job = client.jobs.get(job_id)
    if job.state is JobState.FAILED and job.error is not None:
        raise job.error.error()
    if job.state is JobState.CANCELLED:
        note(f"attn: {job_id} was cancelled at step {job.step}; go on with: attn jobs resume {job_id}")
        raise typer.Exit(1)
    if not json:
        typer.echo(f"{job_id} {job.state}: {describe(job.last_metrics)}")
        measured = CLASSIFICATION in job.last_metrics
        serve = f"serve it with: attn models load {job_id} {job.model_path}"
        typer.echo(f"measure it with: attn evaluate {job_id} --dataset DATA" if measured else serve)
    return job


def describe(metrics: Any) -> str:
    """The metrics of `SHOWN` as text, in a fixed order."""
    found = ((form, metrics[name]) for name, form in SHOWN.items() if name in metrics)
    return "  ".join(form.format(significant(value) if "{}" in form else value) for form, value in found)


@contextmanager
def _view(*, json: bool) -> Iterator[View]:
    if json:
        yield JsonView()
    elif sys.stdout.isatty():
        with BarView() as view:
            yield view
    else:
        yield LineView()


class JsonView:
    """Prints one line of JSON for the job, then one for each event; fields that are None are left out."""

    def show(self, update: TrainingJob | JobEvent) -> None:
        """Print the update."""
        fields = msgspec.structs.asdict(update)
        print_json({name: value for name, value in fields.items() if value is not None})


class LineView:
    """Prints one line of text for each event."""

    def __init__(self) -> None:
        self._steps = 0

    def show(self, update: TrainingJob | JobEvent) -> None:
        """Print the update."""
        if isinstance(update, TrainingJob):
            self._steps = update.config.optimizer.steps
            typer.echo(f"{update.id}: {update.state}, step {update.step}/{update.config.optimizer.steps}")
        elif isinstance(update.payload, Metrics):
            typer.echo(f"step {update.payload.step}/{self._steps}  {describe(update.payload.values)}")
        elif line := sentence(update):
            typer.echo(line)


class BarView:
    """A progress bar with the newest metrics; other events scroll above it. In a narrow terminal the metrics are
    truncated, and the bar, the steps and the remaining time stay visible."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=min(40, console.width // 6)),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("waiting", total=None, values="")
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> BarView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, update: TrainingJob | JobEvent) -> None:
        """Advance the bar, or print a line above it."""
        if isinstance(update, TrainingJob):
            self._progress.update(
                self._task, description=update.state, total=update.config.optimizer.steps, completed=update.step
            )
        elif isinstance(update.payload, Metrics):
            self._metrics |= update.payload.values
            self._progress.update(self._task, completed=update.payload.step, values=describe(self._metrics))
        elif line := sentence(update):
            self._progress.console.print(line, markup=False)
            if isinstance(update.payload, StateChange):
                self._progress.update(self._task, description=update.payload.current)


def sentence(event: JobEvent) -> str:
    """The text for an event other than metrics; empty for kinds of events that this version does not know."""
    match event.payload:
        case StateChange(current=current, error=None):
            return str(current)
        case StateChange(current=current, error=error) if error is not None:
            return f"{current}: {error.message}"
        case Checkpoint(step=step, path=path):
            return f"checkpoint of step {step}: {path}"
        case LogLine(text=text):
            return text
        case _:
            return ""
