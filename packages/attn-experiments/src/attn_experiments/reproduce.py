"""`attn reproduce`: lists the claims, and measures one on this machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.output import Json, note, print_json, print_rows, print_table

from attn_experiments.claims import Claim, Experiment, claim, claims
from attn_experiments.report import Result, Settings, as_text, plain, quiet, save


def reproduce_command(
    *,
    name: Annotated[str | None, typer.Argument(help="A claim, such as CL-4; without one, all are listed.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure every claim that has an experiment.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each kind, with different seeds.")] = 3,
    repeat: Annotated[
        int, typer.Option(min=1, help="Measure so many times, each with other seeds, and count the verdicts.")
    ] = 1,
    share: Annotated[float, typer.Option(help="Fraction of the usual steps; less is faster and less certain.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write JSON and a picture there.")] = None,
    json: Json = False,
) -> None:
    """Measure a claim about attention on this machine: what is claimed, how it is measured, table, picture, verdict.

    With `--all`, a row for each claim that has an experiment: the verdict found, the one on record, and the seconds of
    processor time. With `--repeat` the seeds of no two measurements are the same.

    Examples: `attn reproduce`, `attn reproduce CL-4 --out results`, `attn reproduce CL-12 --repeat 10`
    """
    if name is not None and every:
        raise InvalidValue.of("claim", name, "no claim with --all")
    settings = Settings(seeds=seeds, share=share, say=quiet if json else progress)
    if every:
        print_rows(reproduce_all(settings, repeat, out), "no claim has an experiment", json=json)
        return
    if name is None:
        print_rows([row_of(found) for found in claims().values()], "no claim is known", json=json)
        return
    asked = claim(name)
    if asked.experiment is None:
        shown = f"`pytest -k cl_{asked.number}`" if asked.verdict != "not measured" else "nothing here"
        raise Incompatible(f"{asked.name} has no experiment: {asked.holds}. It is shown by {shown}", claim=asked.name)
    if not json:
        typer.echo(introduction(asked))
    if repeat > 1:
        results, _ = timed(asked.experiment, settings, repeat)
        rows = [{"repeat": n, "verdict": r.verdict, "because": r.because} for n, r in enumerate(results, 1)]
        print_rows(rows, "nothing was measured", json=json)
        return
    (result,), seconds = timed(asked.experiment, settings)
    written = [] if out is None else save(result, asked.name, out)
    if json:
        print_json(plain(result) | {"claim": asked.name, "seconds": seconds, "recorded": asked.verdict})
        return
    show(asked, result, seconds, written)


def timed(experiment: Experiment, settings: Settings, repeat: int = 1) -> tuple[list[Result], float]:
    """The results of an experiment, each with seeds of its own, and the seconds of processor time of one of them."""
    began = time.process_time()
    firsts = (settings.first_seed + settings.seeds * number for number in range(repeat))
    results = [experiment.load()(replace(settings, first_seed=first)) for first in firsts]
    return results, (time.process_time() - began) / repeat


def reproduce_all(settings: Settings, repeat: int, out: Path | None) -> list[dict[str, Any]]:
    """Run every experiment `repeat` times, once for claims that share it, and save the first results into `out`.

    Returns a row for each claim: how often each verdict was found, and why in the first of them.
    """
    found: dict[str, tuple[list[Result], float]] = {}
    rows = []
    for asked in claims().values():
        if asked.experiment is None:
            continue
        target = asked.experiment.target
        if target not in found:
            settings.say(asked.name)
            found[target] = timed(asked.experiment, settings, repeat)
        results, seconds = found[target]
        if out is not None:
            save(results[0], asked.name, out)
        counted = Counter(result.verdict for result in results).most_common()
        said = ", ".join(verdict if repeat == 1 else f"{verdict}: {times}" for verdict, times in counted)
        verdicts = {"verdict": said, "on record": asked.verdict}
        rows.append({"claim": asked.name} | verdicts | {"seconds": round(seconds, 1), "because": results[0].because})
    return rows


def progress(words: str) -> None:
    """Write an experiment's progress to standard error."""
    note(f"  {words}")


def row_of(found: Claim) -> dict[str, Any]:
    """The table row of a claim in the list."""
    experiment = found.experiment
    return {
        "claim": found.name,
        "what is said": found.said,
        "verdict": found.verdict,
        "how it is measured": "by tests" if experiment is None and found.verdict != "not measured" else measured(found),
        "minutes": None if experiment is None else experiment.minutes,
    }


def measured(found: Claim) -> str:
    """How a claim is measured; empty for a claim without an experiment."""
    return "" if found.experiment is None else found.experiment.measured


def introduction(asked: Claim) -> str:
    """The text to print before an experiment: the claim, how it is measured, and the expected time."""
    if asked.experiment is None:
        raise InvalidValue.of("claim", asked.name, "one with an experiment")
    minutes = f"about {asked.experiment.minutes:g} minutes of one core"
    return f"{asked.name}: {asked.said}\nMeasured: {asked.experiment.measured} ({minutes}).\n"


def show(asked: Claim, result: Result, seconds: float, written: list[Path]) -> None:
    """Print the table, the curves as text, and the verdict."""
    print_table(result.rows, "nothing was measured")
    if result.curves is not None:
        typer.echo("\n" + as_text(result.curves))
    typer.echo(f"\nVerdict: {result.verdict}. {result.because}.")
    typer.echo(f"On record: {asked.verdict}. {asked.holds}.")
    typer.echo(f"{seconds:.0f} s" + "".join(f"\n{path}" for path in written))
