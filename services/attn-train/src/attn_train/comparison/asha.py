"""Early stopping: runs are promoted or stopped by their validation losses at equal shares of their budgets.

Asynchronous successive halving, ASHA: Li et al. 2020, A System for Massively Parallel Hyperparameter Tuning,
arXiv 1810.05934, algorithm 2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attn_core.errors import AttnError, WrongState

from attn_train.comparison.plan import Run
from attn_train.comparison.results import LOSS
from attn_train.comparison.runs import Course, Found, Runner, Say
from attn_train.comparison.schedule import Asha


@dataclass(eq=False)
class Contender:
    """The runs of one mechanism or combination of options, which differ in the seed, with their mean losses by rung.

    `measured` is the rung that all of them had reached in an earlier call, -1 for none: they are promoted up to it
    whatever their rank.
    """

    runs: Sequence[Run]
    measured: int = -1
    losses: list[float] = field(default_factory=list)
    failed: bool = False
    _arrived: dict[str, float] = field(default_factory=dict)

    def arrive(self, run: Run, found: Course | AttnError, step: int) -> None:
        """Record that a run reached the next rung, at `step`, or failed; a failure stops all seeds of the contender.

        Raises `WrongState` for a run without a validation loss at `step`.
        """
        if isinstance(found, AttnError):
            self.failed = True
            return
        loss = found.at(step).get(LOSS)
        if loss is None:
            message = f"run {run.id!r} has no validation loss at step {step}, which the schedule needs"
            raise WrongState(message, run=run.id)
        self._arrived[run.id] = loss if math.isfinite(loss) else math.inf
        if len(self._arrived) == len(self.runs):
            self.losses.append(statistics.fmean(self._arrived.values()))
            self._arrived = {}


class Bracket:
    """Contenders that compete with each other; decides which of them trains next, and up to which rung."""

    def __init__(self, schedule: Asha, contenders: Sequence[Contender]) -> None:
        self._schedule = schedule
        self._begun = dict.fromkeys(contenders, -1)

    def following(self) -> tuple[Contender, int] | None:
        """Return the contender to train next and its rung; None while this depends on runs in progress, and at the end.

        Contenders that have not begun come first: the more results a rung has, the fewer wrong promotions there are.
        """
        for rung in range(-1, self._schedule.promotions):
            for contender in self._going_on(rung):
                if self._begun[contender] == rung:
                    self._begun[contender] = rung + 1
                    return contender, rung + 1
        return None

    def _going_on(self, rung: int) -> list[Contender]:
        """Return the contenders to promote from a rung: the best of those that reached it; all of them for rung -1.

        A contender that failed before the next rung is replaced by the next best one.
        """
        if rung < 0:
            return list(self._begun)
        arrived = [contender for contender in self._begun if len(contender.losses) > rung]
        count = self._schedule.promoted(len(arrived), complete=self._is_complete(rung))
        able = [contender for contender in arrived if not contender.failed or len(contender.losses) > rung + 1]
        best = sorted(able, key=lambda contender: contender.losses[rung])
        return best[:count] + [contender for contender in best[count:] if contender.measured > rung]

    def _is_complete(self, rung: int) -> bool:
        """Whether no other contender can still reach a rung."""
        if rung < 0:
            return True
        on_the_way = any(
            begun == rung and len(contender.losses) <= rung and not contender.failed
            for contender, begun in self._begun.items()
        )
        waiting = any(self._begun[contender] < rung for contender in self._going_on(rung - 1))
        return not on_the_way and not waiting and self._is_complete(rung - 1)


def trained_by_asha(schedule: Asha, runs: Sequence[Run], runner: Runner, say: Say) -> Iterator[Found]:
    """Train runs with early stopping; yield each run at every rung that it reaches, with its course or its error.

    A course ends at the rung. Runs of the same size and dataset compete, the seeds of a mechanism as one contender.
    Steps that were measured before are not run again.
    """
    brackets = _brackets(schedule, runs, runner)
    training: dict[str, tuple[Contender, int]] = {}
    while True:
        while (not training or runner.side_by_side) and (found := _following(brackets)) is not None:
            contender, rung = found
            for run in contender.runs:
                step = schedule.steps(run.config.optimizer.steps)[rung]
                until = None if rung == schedule.promotions else step
                course = _reached(runner, run, step, until)
                if course is None:
                    training[run.id] = contender, step
                    runner.begin(run, until)
                else:
                    contender.arrive(run, course, step)
                    yield run, course
        if not training:
            return
        run, outcome = runner.ended(say)
        contender, step = training.pop(run.id)
        contender.arrive(run, outcome, step)
        yield run, outcome


def _reached(runner: Runner, run: Run, step: int, until: int | None) -> Course | None:
    """Return the course of a run up to a rung, if it has reached it, else None; `until` is None at the last rung."""
    course = runner.course(run)
    if course is None or LOSS not in course.at(step):
        return None
    if until is None:
        return course if course.finished else None
    return course.until(until)


def _brackets(schedule: Asha, runs: Sequence[Run], runner: Runner) -> list[Bracket]:
    brackets: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        brackets.setdefault((run.dataset, run.size), {}).setdefault(run.label, []).append(run)
    made = []
    for labels in brackets.values():
        groups = [(seeds, min(_measured(schedule, run, runner) for run in seeds)) for seeds in labels.values()]
        made.append(Bracket(schedule, [Contender(seeds, measured) for seeds, measured in groups]))
    return made


def _measured(schedule: Asha, run: Run, runner: Runner) -> int:
    """Return the index of the last rung that a run has reached, -1 for none."""
    course = runner.course(run)
    steps = schedule.steps(run.config.optimizer.steps)
    return -1 if course is None else sum(step <= course.steps for step in steps) - 1


def _following(brackets: Sequence[Bracket]) -> tuple[Contender, int] | None:
    return next((found for bracket in brackets if (found := bracket.following()) is not None), None)
