"""What came out of a comparison: a row for each mechanism with intervals over seeds, and fits over sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import AttnError

from attn_train.comparison.plan import Question, Run
from attn_train.comparison.runs import Course, Found
from attn_train.comparison.statistics import Interval, fitted_exponent

LOSS, ACCURACY = "validation_loss", "answer_accuracy"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one mechanism, size and dataset, which differ in the seed."""

    label: str
    size: str
    dataset: str
    runs: tuple[tuple[Run, Course], ...]
    failures: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The steps that every run has done."""
        return min((course.steps for _, course in self.runs), default=0)

    @property
    def stopped(self) -> bool:
        """Whether runs have not spent their budgets."""
        return not all(course.finished for _, course in self.runs)

    @property
    def name(self) -> str:
        """The mechanism, and its size where there are several."""
        return f"{self.label} {self.size}".strip()

    def interval(self, metric: str) -> Interval | None:
        """The mean of the last values of a metric over seeds; None where none was measured."""
        values = [course.last[metric] for _, course in self.runs if metric in course.last]
        return Interval.of_mean(values) if values else None

    def curve(self, metric: str) -> list[tuple[float, float, Interval]]:
        """(FLOPs, mean seconds, interval) of a metric along the course, at steps that every seed has measured."""
        curves = [{step: (s, value) for step, s, value in course.curve(metric)} for _, course in self.runs]
        shared = sorted(set.intersection(*map(set, curves))) if curves else []
        price = self.runs[0][0].price.flops if self.runs else 0.0
        return [
            (
                step * price,
                statistics.fmean(curve[step][0] for curve in curves),
                Interval.of_mean([curve[step][1] for curve in curves]),
            )
            for step in shared
        ]


def grouped(found: Mapping[str, Found]) -> list[Group]:
    """The groups of runs by id, in their order."""
    keys: dict[tuple[str, str, str], list[tuple[Run, Course | AttnError]]] = {}
    for run, course in found.values():
        keys.setdefault((run.label, run.size, run.dataset), []).append((run, course))
    return [
        Group(
            label=label,
            size=size,
            dataset=dataset,
            runs=tuple((run, course) for run, course in members if isinstance(course, Course)),
            failures=tuple(f"{run.id}: {error.message}" for run, error in members if isinstance(error, AttnError)),
        )
        for (label, size, dataset), members in keys.items()
    ]


def table(question: Question, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each mechanism and size, best loss first: prices, loss, accuracy of probes, seconds, KV cache.

    With a schedule those that spent more of their budget come first, and a column says where the others were stopped.
    """
    main = question.config.data.dataset
    rows = []
    for group in (group for group in groups if group.dataset == main and group.runs):
        run, _ = group.runs[0]
        loss, accuracy, seconds = (group.interval(metric) for metric in (LOSS, ACCURACY, "elapsed_seconds"))
        row: dict[str, Any] = {
            "mechanism": group.name,
            "parameters": run.price.parameters,
            "steps": group.steps,
            "FLOPs": f"{group.steps * run.price.flops:.3g}",
            "validation loss": "" if loss is None else loss.text(),
        }
        if accuracy is not None:
            row[f"{Path(main).stem} right"] = accuracy.text(3)
        for probe in question.probes:
            if probe != main:
                row |= _probe(question, groups, group, probe)
        row["seconds"] = "" if seconds is None else seconds.text(1)
        row["KV cache bytes"] = run.price.cache_bytes
        if question.schedule is not None:
            row["stopped"] = stopped_at(question, group)
        spent = group.steps / run.config.optimizer.steps if group.stopped else 1.0
        rows.append(((-spent, math.inf if loss is None else loss.value), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def stopped_at(question: Question, group: Group) -> str:
    """`rung 1 of 3, 1/9`: where a group was stopped, and the share of its budget; empty where it was not."""
    if question.schedule is None or not group.stopped or not group.runs:
        return ""
    rungs = question.schedule.rungs
    steps = question.schedule.steps(group.runs[0][0].config.optimizer.steps)
    reached = sum(step <= group.steps for step in steps)
    return f"rung {reached} of {len(rungs)}, {rungs[reached - 1]}" if reached else f"before rung 1 of {len(rungs)}"


def _probe(question: Question, groups: Sequence[Group], like: Group, probe: str) -> dict[str, str]:
    """Share of right answers to a probe, or where the mechanism was stopped on it."""
    for group in groups:
        if (group.label, group.size, group.dataset) == (like.label, like.size, probe) and group.runs:
            right = group.interval(ACCURACY)
            return {f"{probe} right": stopped_at(question, group) if right is None else right.text(3)}
    return {f"{probe} right": ""}


def scaling(question: Question, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each mechanism with the exponent that `exponents` finds."""
    return [
        {"mechanism": label, "exponent of parameters": fit.text(), "points": points}
        for label, fit, points in exponents(question, groups)
    ]


def exponents(question: Question, groups: Sequence[Group]) -> list[tuple[str, Interval, int]]:
    """(mechanism, exponent of its loss in parameters outside of embeddings, points); empty with fewer than 3 sizes."""
    if len(question.sizes) < 3:
        return []
    found = []
    for label in dict.fromkeys(group.label for group in groups):
        points = scaling_points(groups, label, question.config.data.dataset)
        if len({size for size, _ in points}) >= 3:
            fit = fitted_exponent([size for size, _ in points], [loss for _, loss in points])
            found.append((label, fit, len(points)))
    return found


def scaling_points(groups: Sequence[Group], label: str, dataset: str) -> list[tuple[float, float]]:
    """(parameters outside of embeddings, validation loss) of every run of a mechanism that spent its budget."""
    return [
        (float(run.price.parameters - run.price.embedding_parameters), course.last[LOSS])
        for group in groups
        if group.label == label and group.dataset == dataset
        for run, course in group.runs
        if LOSS in course.last and course.finished
    ]


def as_json(question: Question, groups: Sequence[Group]) -> dict[str, Any]:
    """Everything that was found, as JSON holds it: groups of runs, fits, and each run with its curve and model."""
    return {
        "name": question.title,
        "budget": question.spent,
        "schedule": None if question.schedule is None else str(question.schedule),
        "seeds": question.seeds,
        "datasets": question.datasets(),
        "groups": [_plain_group(question, group) for group in groups if group.runs],
        "scaling": [
            {"mechanism": label, "exponent": fit.plain(), "points": points}
            for label, fit, points in exponents(question, groups)
        ],
        "failures": [failure for group in groups for failure in group.failures],
        "runs": [
            run.facts()
            | {"steps": course.steps, "last": course.last, "curve": course.curve(LOSS)}
            | {"finished": course.finished, "model_path": course.model_path}
            for group in groups
            for run, course in group.runs
        ],
    }


def _plain_group(question: Question, group: Group) -> dict[str, Any]:
    """The prices of a group, and the means of what its runs measured."""
    run, _ = group.runs[0]
    measured = {name: group.interval(name) for name in (LOSS, ACCURACY, "elapsed_seconds")}
    return {
        "mechanism": group.label,
        "size": group.size,
        "dataset": group.dataset,
        "parameters": run.price.parameters,
        "steps": group.steps,
        "flops": group.steps * run.price.flops,
        "stopped": stopped_at(question, group),
        "cache_bytes": run.price.cache_bytes,
        "runs": len(group.runs),
    } | {name: None if found is None else found.plain() for name, found in measured.items()}
