"""The command `attn compare --train`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from attn_cli.recipe import located, recipe_names, recipe_under
from attn_client.client import Client
from attn_client.settings import ClientSettings
from attn_core.errors import WrongState
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.home import home_folder
from attn_schema.json_text import json_text
from attn_schema.output import Json, note, print_json, print_rows, print_table
from attn_schema.training import TrainingConfig

Threads = Annotated[int | None, typer.Option(help="CPU threads of the runs that train in this process.", min=1)]
Server = Annotated[
    bool, typer.Option("--server", help="Train the runs as jobs of a server instead of in this process.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the runs and their costs without starting them.")]
Recipe = Annotated[str, typer.Option(help=f"Start from a recipe: {', '.join(recipe_names())}, or a TOML file.")]


@with_flags(top="training", defaults=recipe_under)
def compare_training_command(  # noqa: PLR0913 - options, given by name
    *,
    train: Annotated[
        str,
        typer.Option(help="Mechanisms, separated by commas; options follow colons: mha,sliding_window:window=16."),
    ],
    budget: Annotated[str, typer.Option(help="Budget of each run: flops=1e12, minutes=2 or tokens=1e6.")],
    seeds: Annotated[int, typer.Option(help="Runs per mechanism, with consecutive seeds from --seed.", min=1)] = 3,
    probes: Annotated[
        str, typer.Option(help="Tasks to train on as well, with the same budget: recall,copy,swaps,needle; or none.")
    ] = "recall,needle",
    sizes: Annotated[
        str, typer.Option(help="At least three HIDDEN_SIZExNUM_LAYERS, for scaling curves with fitted exponents.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the comparison; by default derived from the options.")] = "",
    threads: Threads = None,
    server: Server = False,
    dry_run: DryRun = False,
    recipe: Recipe = "",  # noqa: ARG001 - `recipe_under` reads it
    json: Json = False,
    training: TrainingConfig,
    connection: ConnectionOptions,
) -> None:
    """Train mechanisms with equal budgets and several seeds, and compare them in a table, plots and an HTML report.

    Example: `attn compare --train mha,gqa:num_kv_heads=2,linear --budget flops=1e12 --dataset shakespeare`. Repeat the
    command to resume an interrupted comparison: finished runs are not run again. Results are written to
    ATTN_HOME/comparisons/NAME; the model of every run can be served by its name.
    """
    from attn_train.comparison.budget import Budget
    from attn_train.comparison.plan import Question, parse_entries, parse_sizes, planned
    from attn_train.comparison.report import figure_class

    data = training.data
    question = Question(
        config=training.replace(data=data.replace(dataset=located(data.dataset))),
        entries=parse_entries(train),
        budget=Budget.parse(budget),
        seeds=seeds,
        probes=[] if probes == "none" else [probe.strip() for probe in probes.split(",") if probe.strip()],
        sizes=parse_sizes(sizes),
        name=name,
    )
    figure_class()
    runs = planned(question, home_folder(), _say(json=json))
    _start(question, runs, Where(dry_run=dry_run, threads=threads, server=server, json=json), connection)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where the runs are trained, and how results are printed."""

    dry_run: bool
    threads: int | None
    server: bool
    json: bool


def _start(question: Any, runs: Any, where: Where, connection: ConnectionOptions) -> None:
    """Print the cost of the runs with `--dry-run`, else train them."""
    from attn_train.comparison.runs import ComparisonFolder, Runner, RunsHere, RunsOnServer

    home = home_folder()
    if where.dry_run:
        rows = [_priced(run) for run in runs if run.seed == runs[0].seed]
        print_rows(rows if where.json else [_in_words(row) for row in rows], "there are no runs", json=where.json)
        return
    folder = ComparisonFolder(home, question.title)
    runs = folder.settled(question, runs)
    with ExitStack() as stack:
        runner: Runner = RunsHere(home, folder, where.threads)
        if where.server:
            runner = RunsOnServer(stack.enter_context(Client(ClientSettings.of(connection))))
        _run_all(question, runs, runner, folder, json=where.json)


def _run_all(question: Any, runs: Any, runner: Any, folder: Any, *, json: bool) -> None:
    """Train all runs; the results file is updated after each run, the report is written at the end."""
    from attn_train.comparison.report import page, picture, png
    from attn_train.comparison.results import as_json, grouped, scaling, table
    from attn_train.comparison.runs import trained

    found: dict[str, Any] = {}
    groups, results = [], dict[str, Any]()
    command = shlex.join(["attn", *sys.argv[1:]])
    for run, course in trained(runs, runner, _say(json=json)):
        found[run.id] = run, course
        groups = grouped({run.id: found[run.id] for run in runs if run.id in found})
        results = as_json(question, groups) | {"command": command, "planned_runs": len(runs)}
        folder.write("results.json", json_text(results, indent=1) + "\n")
    drawn = picture(question, groups)
    folder.write("report.png", png(drawn))
    folder.write("report.html", page(question, groups, drawn, command))
    if json:
        print_json(results)
    else:
        print_table(table(question, groups), "no run has finished")
        if fits := scaling(question, groups):
            print_table(fits, "", title="Scaling")
        typer.echo(f"{folder.path}: results.json, report.html, report.png")
    if failures := [failure for group in groups for failure in group.failures]:
        raise WrongState(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def _priced(run: Any) -> dict[str, Any]:
    """Return the row of `--dry-run` for one kind of run."""
    return {
        "mechanism": f"{run.label} {run.size}".strip(),
        "data": run.dataset,
        "parameters": run.price.parameters,
        "FLOPs a step": run.price.flops,
        "steps": run.config.optimizer.steps,
        "FLOPs": run.flops,
        "KV cache bytes": run.price.cache_bytes,
    }


def _in_words(row: dict[str, Any]) -> dict[str, Any]:
    """Format the large numbers of a row for the terminal."""
    return row | {heading: f"{row[heading]:.4g}" for heading in ("FLOPs a step", "FLOPs")}


def _say(*, json: bool) -> Callable[[str], None]:
    """Return the function that prints progress; with `--json` it prints nothing."""
    return _silent if json else note


def _silent(_words: str) -> None:
    """Discard a progress message."""
