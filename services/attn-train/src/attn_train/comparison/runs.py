"""The runs of a comparison: in this process, or as jobs of a server; what is finished is not run again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeAlias

import msgspec
from attn_core.errors import AlreadyExists, AttnError, UnknownName, WrongState
from attn_schema.training import JobEvent, JobState, LogLine, Metrics, TrainingConfig, TrainingJob

from attn_train.attempt import Assignment, Failed, Finished, Message
from attn_train.comparison.plan import Question, Run
from attn_train.records import Stop, StopFlag
from attn_train.settings import Layout

Say = Callable[[str], None]
PLAN = "plan.json"
POLL_SECONDS = 0.5
"""How often jobs of a server are looked at."""


@dataclass(frozen=True)
class Course:
    """What was measured of a run: points by step, and the last value of each metric."""

    points: tuple[tuple[int, dict[str, float]], ...]
    finished: bool
    model_path: str = ""

    @property
    def last(self) -> dict[str, float]:
        """The newest value of each metric."""
        found: dict[str, float] = {}
        for _, values in self.points:
            found |= values
        return found

    @property
    def steps(self) -> int:
        """The step of the last measurement."""
        return self.points[-1][0] if self.points else 0

    def at(self, step: int) -> dict[str, float]:
        """What was measured at a step."""
        return dict(self.points).get(step, {})

    def until(self, step: int) -> Course:
        """The course of a run that stopped at a step."""
        return Course(tuple(point for point in self.points if point[0] <= step), finished=False)

    def curve(self, metric: str) -> list[tuple[int, float, float]]:
        """(step, seconds of training, value) where the metric was measured."""
        found, seconds = [], 0.0
        for step, values in self.points:
            seconds = values.get("elapsed_seconds", seconds)
            if metric in values:
                found.append((step, seconds, values[metric]))
        return found


Found: TypeAlias = tuple[Run, Course | AttnError]
"""A run with what was measured of it, or the error with which it failed."""


class Runner(Protocol):
    """Where runs train."""

    side_by_side: bool
    """Whether several that were begun train at the same time."""

    def course(self, run: Run) -> Course | None:
        """What is there of a run; None before it was started, or while it trains."""
        ...

    def begin(self, run: Run, until: int | None = None) -> None:
        """Start a run, or go on with it, to its end, or to a step where it stops with a checkpoint."""
        ...

    def ended(self, say: Say) -> Found:
        """Wait for one of those that were begun."""
        ...


class ComparisonFolder:
    """`home/comparisons/NAME`: the plan, the measurements of runs in this process, results and report."""

    def __init__(self, home: Path, name: str) -> None:
        self.path = home / "comparisons" / name

    def settled(self, question: Question, runs: Sequence[Run]) -> list[Run]:
        """The runs, with the configurations of the plan that is there; else they become the plan.

        Minutes buy other steps each time they are measured; what was planned once is what is run. What a schedule
        has stopped goes on to its end without one. Raises `AlreadyExists` where the folder has the plan of another
        question.
        """
        path, ids = self.path / PLAN, [run.id for run in runs]
        if path.is_file():
            saved = json.loads(path.read_text("utf-8"))
            kept = {run["id"]: TrainingConfig.from_mapping(run["config"]) for run in saved["runs"]}
            same = list(kept) == ids and saved["budget"] == question.spent
            same = same and (question.schedule is None or saved["schedule"] == str(question.schedule))
            if not same or any(_asked(kept[run.id]) != _asked(run.config) for run in runs):
                raise AlreadyExists(f"there is another comparison {self.path.name!r} in {self.path}; choose a --name")
            return [replace(run, config=kept[run.id]) for run in runs]
        listed = [run.facts() | {"config": msgspec.to_builtins(run.config)} for run in runs]
        plan = {"name": question.title, "budget": question.spent, "schedule": str(question.schedule or "")}
        self.write(PLAN, json.dumps(plan | {"runs": listed}, indent=1))
        return list(runs)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file in place of what was there, whole at any moment."""
        self.path.mkdir(parents=True, exist_ok=True)
        fresh = self.path / f".{name}.partial"
        fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
        return fresh.replace(self.path / name)


def _asked(config: TrainingConfig) -> TrainingConfig:
    """A configuration without what the budget decides."""
    optimizer = config.optimizer.replace(steps=1, warmup_steps=0, min_learning_rate=None)
    optimizer = optimizer.replace(start_decay_steps=None, decay_steps=None, lr_scheduler_type="constant")
    return config.replace(optimizer=optimizer, evaluation=config.evaluation.replace(eval_steps=1, logging_steps=1))


class RunsHere:
    """Runs in this process, one after the other; models and checkpoints lie where a server has those of jobs."""

    side_by_side = False

    def __init__(self, home: Path, folder: ComparisonFolder, threads: int | None) -> None:
        self._home, self._threads = home, threads
        self._folder = folder.path / "runs"
        self._begun: deque[tuple[Run, int | None]] = deque()

    def begin(self, run: Run, until: int | None = None) -> None:
        """See `Runner.begin`; it starts with `ended`."""
        self._begun.append((run, until))

    def ended(self, say: Say) -> Found:
        """See `Runner.ended`: those that were begun first come first."""
        run, until = self._begun.popleft()
        steps = run.config.optimizer.steps
        say(f"{run.id}: {steps} steps" if until is None else f"{run.id}: {until} of {steps} steps")
        try:
            return run, self.train(run, say, until)
        except AttnError as error:
            say(f"{run.id} failed: {error.message}")
            return run, error

    def course(self, run: Run) -> Course | None:
        """From its measurements, a line of JSON each; a step that was measured again counts once."""
        path = self._folder / f"{run.id}.jsonl"
        if not path.is_file():
            return None
        points: dict[int, dict[str, float]] = {}
        model = ""
        for line in path.read_text("utf-8").splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # the line that a killed process was writing
                continue
            if "model_path" in found:
                model = found["model_path"]
            else:
                points[found["step"]] = found["values"]
        return Course(tuple(sorted(points.items())), bool(model) and Path(model).is_dir(), model)

    def train(self, run: Run, say: Say, until: int | None = None) -> Course:
        """By the worker that jobs have, from the newest checkpoint; Ctrl-C writes one first.

        Raises the error with which it failed, and `KeyboardInterrupt`.
        """
        from attn_train.worker import work

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{run.id}.jsonl"
        Layout(self._home).job(run.id).mkdir(parents=True, exist_ok=True)
        reached: list[int] = []
        with path.open("a", encoding="utf-8") as file, _stopping_on_interrupt() as flag:

            def send(message: Message) -> None:
                if isinstance(message, Metrics):
                    if until is not None and message.step >= until:
                        reached.append(message.step)
                        flag.set(Stop.SAVE)
                    file.write(json.dumps({"step": message.step, "values": message.values}) + "\n")
                    file.flush()
                elif isinstance(message, LogLine):
                    say(f"{run.id}: {message.text}")

            assignment = Assignment(job_id=run.id, attempt=1, config=run.config, home=self._home, threads=self._threads)
            outcome = work(assignment, send, flag)
            if isinstance(outcome, Failed):
                raise outcome.error.error()
            if isinstance(outcome, Finished):
                file.write(json.dumps({"model_path": outcome.model_path}) + "\n")
            elif not reached:
                raise KeyboardInterrupt
            file.flush()
            os.fsync(file.fileno())
        course = self.course(run)
        if course is None:
            raise WrongState(f"run {run.id!r} left no measurements", run=run.id)
        return course


@contextmanager
def _stopping_on_interrupt() -> Iterator[StopFlag]:
    """A flag that Ctrl-C sets, so that a checkpoint is written; a second Ctrl-C ends at once."""
    flag = StopFlag()

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        if flag.get() is not None:
            raise KeyboardInterrupt
        flag.set(Stop.SAVE)

    try:
        before = signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not the main thread, which alone gets signals
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class RunsOnServer:
    """A job of a server each, which train side by side as the server has room; `client` is attn-client's."""

    side_by_side = True

    def __init__(self, client: Any) -> None:
        self._client = client
        self._begun: dict[str, tuple[Run, int | None]] = {}
        self._stopping: set[str] = set()

    def course(self, run: Run) -> Course | None:
        """Of a job that has ended well or was stopped."""
        try:
            job: TrainingJob = self._client.jobs.get(run.id)
        except UnknownName:
            return None
        return self._measured(job) if job.state in (JobState.SUCCEEDED, JobState.CANCELLED) else None

    def begin(self, run: Run, until: int | None = None) -> None:
        """Submit the job, or resume it."""
        job: TrainingJob = self._client.jobs.submit(run.config, job_id=run.id)
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            self._client.jobs.resume(run.id)
        self._begun[run.id] = run, until

    def ended(self, say: Say) -> Found:
        """Look at the jobs until one has ended; one that has measured the step where it stops is cancelled."""
        while True:
            for run, until in list(self._begun.values()):
                job: TrainingJob = self._client.jobs.get(run.id)
                if job.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
                    del self._begun[run.id]
                    self._stopping.discard(run.id)
                    return run, self._outcome(job, until, say)
                if until is not None and job.step >= until and run.id not in self._stopping:
                    self._stopping.add(run.id)
                    with suppress(WrongState):  # it has ended meanwhile
                        self._client.jobs.cancel(run.id)
            time.sleep(POLL_SECONDS)

    def _outcome(self, job: TrainingJob, until: int | None, say: Say) -> Course | AttnError:
        if job.state is JobState.FAILED and job.error is not None:
            error = job.error.error()
            say(f"{job.id} failed: {error.message}")
            return error
        course = self._measured(job)
        if job.state is JobState.SUCCEEDED and until is None:
            say(f"{job.id}: {job.step} steps")
            return course
        if until is not None and course.at(until):
            say(f"{job.id}: {until} of {job.config.optimizer.steps} steps")
            return course.until(until)
        return WrongState(f"job {job.id!r} is {job.state}; compare again to go on with it", job=job.id)

    def _measured(self, job: TrainingJob) -> Course:
        """What the events of a job say that has ended."""
        points: dict[int, dict[str, float]] = {}
        for update in self._client.jobs.watch(job.id):
            if isinstance(update, JobEvent) and update.metrics is not None:
                points[update.metrics.step] = dict(update.metrics.values)
        return Course(tuple(sorted(points.items())), job.state is JobState.SUCCEEDED, job.model_path)


def trained(runs: Sequence[Run], runner: Runner, say: Say) -> Iterator[Found]:
    """Each run with what was measured of it, or the error with which it failed; the others go on."""
    left = 0
    for run in runs:
        found = runner.course(run)
        if found is not None and found.finished:
            yield run, found
        else:
            runner.begin(run)
            left += 1
    for number in range(left):
        say(f"{len(runs) - left + number} of {len(runs)} runs are done")
        yield runner.ended(say)
