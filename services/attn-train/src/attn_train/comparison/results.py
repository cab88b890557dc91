"""The results of a comparison: a row per mechanism with confidence intervals over seeds, and scaling fits."""

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
class RunGroup:
    """The runs of one mechanism, size and dataset, which differ in the seed."""

    label: str
    size: str
    dataset: str
    runs: tuple[tuple[Run, Course], ...]
    failures: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of steps that every run of the group has done."""
        return min((course.steps for _, course in self.runs), default=0)

    @property
    def name(self) -> str:
        """The mechanism, followed by the size if the comparison has several."""
        return f"{self.label} {self.size}".strip()

    def interval(self, metric: str) -> Interval | None:
        """Return the mean over seeds of the last values of a metric; None if no run measured it."""
        values = [course.last[metric] for _, course in self.runs if metric in course.last]
        return Interval.of_mean(values) if values else None

    def curve(self, metric: str) -> list[tuple[float, float, Interval]]:
        """Return (FLOPs, mean seconds, interval) of a metric at each step at which every seed measured it."""
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


def grouped(found: Mapping[str, Found]) -> list[RunGroup]:
    """RunGroup runs that differ only in the seed; groups are in the order of their first run."""
    keys: dict[tuple[str, str, str], list[tuple[Run, Course | AttnError]]] = {}
    for run, course in found.values():
        keys.setdefault((run.label, run.size, run.dataset), []).append((run, course))
    return [
        RunGroup(
            label=label,
            size=size,
            dataset=dataset,
            runs=tuple((run, course) for run, course in members if isinstance(course, Course)),
            failures=tuple(f"{run.id}: {error.message}" for run, error in members if isinstance(error, AttnError)),
        )
        for (label, size, dataset), members in keys.items()
    ]


def table(question: Question, groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return a row for each mechanism and size, lowest loss first: costs, loss, probe accuracy, seconds, KV cache."""
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
                row |= _probe(groups, group, probe)
        row["seconds"] = "" if seconds is None else seconds.text(1)
        row["KV cache bytes"] = run.price.cache_bytes
        rows.append((math.inf if loss is None else loss.value, row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _probe(groups: Sequence[RunGroup], like: RunGroup, probe: str) -> dict[str, str]:
    """Return the loss and the accuracy on a probe, empty if they are not measured."""
    same = (group for group in groups if (group.label, group.size, group.dataset) == (like.label, like.size, probe))
    group = next(same, None)
    found = {} if group is None else {metric: group.interval(metric) for metric in (LOSS, ACCURACY)}
    texts = {metric: value.text(3) for metric, value in found.items() if value is not None}
    return {f"{probe} loss": texts.get(LOSS, ""), f"{probe} right": texts.get(ACCURACY, "")}


def scaling(question: Question, groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return the scaling table: a row for each mechanism with its exponent, see `exponents`."""
    return [
        {"mechanism": label, "exponent of parameters": fit.text(), "points": points}
        for label, fit, points in exponents(question, groups)
    ]


def exponents(question: Question, groups: Sequence[RunGroup]) -> list[tuple[str, Interval, int]]:
    """Return (mechanism, scaling exponent of the loss, number of points); empty with fewer than 3 sizes.

    The exponent is that of the number of parameters without embeddings.
    """
    if len(question.sizes) < 3:
        return []
    found = []
    for label in dict.fromkeys(group.label for group in groups):
        points = scaling_points(groups, label, question.config.data.dataset)
        if len({size for size, _ in points}) >= 3:
            fit = fitted_exponent([size for size, _ in points], [loss for _, loss in points])
            found.append((label, fit, len(points)))
    return found


def scaling_points(groups: Sequence[RunGroup], label: str, dataset: str) -> list[tuple[float, float]]:
    """Return (parameters without embeddings, validation loss) of each run of a mechanism."""
    return [
        (float(run.price.parameters - run.price.embedding_parameters), course.last[LOSS])
        for group in groups
        if group.label == label and group.dataset == dataset
        for run, course in group.runs
        if LOSS in course.last
    ]


def as_json(question: Question, groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return all results as JSON values: the groups, the scaling fits, and each run with its loss curve and model."""
    return {
        "name": question.title,
        "budget": str(question.budget),
        "seeds": question.seeds,
        "datasets": question.datasets(),
        "groups": [_plain_group(group) for group in groups if group.runs],
        "scaling": [
            {"mechanism": label, "exponent": fit.plain(), "points": points}
            for label, fit, points in exponents(question, groups)
        ],
        "failures": [failure for group in groups for failure in group.failures],
        "runs": [
            run.facts()
            | {"steps": course.steps, "last": course.last, "curve": course.curve(LOSS)}
            | {"model_path": course.model_path}
            for group in groups
            for run, course in group.runs
        ],
    }


def _plain_group(group: RunGroup) -> dict[str, Any]:
    """Return the costs of a group and the means of its metrics as JSON values."""
    run, _ = group.runs[0]
    measured = {name: group.interval(name) for name in (LOSS, ACCURACY, "elapsed_seconds")}
    return {
        "mechanism": group.label,
        "size": group.size,
        "dataset": group.dataset,
        "parameters": run.price.parameters,
        "steps": group.steps,
        "flops": group.steps * run.price.flops,
        "cache_bytes": run.price.cache_bytes,
        "runs": len(group.runs),
    } | {name: None if found is None else found.plain() for name, found in measured.items()}
