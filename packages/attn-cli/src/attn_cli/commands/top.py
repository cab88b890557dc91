"""`attn top`: a live display of a server's models, requests and jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from attn_core.errors import AttnError, Incompatible
from attn_schema import ConnectionOptions, EngineStats, ModelInfo, ModelState
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json, print_table, significant

from attn_cli.commands.options import connect

if TYPE_CHECKING:
    from attn_client import Client
    from attn_schema.training import TrainingJob
    from rich.console import Group

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The state of a server at one time (of `time.monotonic()`); jobs that have ended are left out."""

    time: float
    models: list[ModelInfo]
    stats: dict[str, EngineStats]
    jobs: list[TrainingJob]

    @classmethod
    def of(cls, client: Client) -> Snapshot:
        """Query a server. A model that does not answer has no stats; a server without training has no jobs."""
        models = client.models.list()
        stats = {}
        for model in models:
            if model.state is ModelState.SERVING:
                try:
                    stats[model.name] = client.engine_stats(model.name)
                except AttnError:
                    continue
        try:
            jobs = [job for job in client.jobs.list() if not job.state.final]
        except Incompatible:
            jobs = []
        return cls(time.monotonic(), models, stats, jobs)

    def plain(self) -> dict[str, Any]:
        """The models, each with its stats or None, and the jobs, as values for JSON."""
        models = [
            msgspec.to_builtins(model, enc_hook=str) | {"stats": self.stats.get(model.name)} for model in self.models
        ]
        return {"models": models, "jobs": self.jobs}

    def model_rows(self, before: Snapshot | None) -> list[Row]:
        """One table row for each model; rates are computed from the difference to `before`."""
        return [self._model_row(model, before) for model in self.models]

    def _model_row(self, model: ModelInfo, before: Snapshot | None) -> Row:
        stats = self.stats.get(model.name)
        row = {"model": model.name, "state": str(model.state)}
        if stats is None:
            return row | dict.fromkeys(("running", "waiting", "KV cache", "tokens/s", "computed/s", "preemptions"), "-")
        used = f"{stats.kv_tokens_used / stats.kv_tokens_total:.1%}" if stats.kv_tokens_total else "-"
        earlier = before.stats.get(model.name) if before is not None else None
        return row | {
            "running": stats.running,
            "waiting": stats.waiting,
            "KV cache": used,
            "tokens/s": self._rate("generated_tokens", stats, earlier, before),
            "computed/s": self._rate("computed_tokens", stats, earlier, before),
            "preemptions": stats.preemptions,
        }

    def job_rows(self) -> list[Row]:
        """One table row for each job."""
        return [
            {
                "job": job.id,
                "state": str(job.state),
                "step": job.step,
                "loss": _number(job.last_metrics.get("loss"), significant),
                "tokens/s": _number(job.last_metrics.get("tokens_per_second"), "{:,.0f}".format),
            }
            for job in self.jobs
        ]

    def _rate(self, field: str, now: EngineStats, earlier: EngineStats | None, before: Snapshot | None) -> str:
        if earlier is None or before is None:
            return "-"
        more = getattr(now, field) - getattr(earlier, field)
        # A counter that decreased belongs to a new engine.
        return f"{more / (self.time - before.time):,.1f}" if more >= 0 else "-"


def _number(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def picture(snapshot: Snapshot, before: Snapshot | None, address: str) -> Group:
    """The tables of one snapshot, with a title line."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = [f"attn at {address}, {time.strftime('%H:%M:%S')}; Ctrl-C ends"]
    for rows, empty in ((snapshot.model_rows(before), "no model is loaded"), (snapshot.job_rows(), "no job is open")):
        if not rows:
            parts.append(empty)
            continue
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in rows[0]:
            table.add_column(column, justify="left" if column in {"model", "job", "state"} else "right")
        for row in rows:
            table.add_row(*(str(cell) for cell in row.values()))
        parts.append(table)
    return Group(*parts)


@with_flags
def top_command(
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, without rates.")] = False,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Show a live view of a server: its models with their requests, KV cache and tokens per second, and its open jobs.

    In a pipe, or with `--json`, prints the current state once.
    """
    with connect(connection) as client:
        snapshot = Snapshot.of(client)
        if json:
            print_json(snapshot.plain())
        elif once or not sys.stdout.isatty():
            print_table(snapshot.model_rows(None), "no model is loaded")
            print_table(snapshot.job_rows(), "no job is open")
        else:
            _watch(client, snapshot, interval, connection.address)


def _watch(client: Client, snapshot: Snapshot, interval: float, address: str) -> None:
    from rich.live import Live

    before: Snapshot | None = None
    with Live(picture(snapshot, before, address), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, snapshot = snapshot, Snapshot.of(client)
            live.update(picture(snapshot, before, address), refresh=True)
