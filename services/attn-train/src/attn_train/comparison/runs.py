"""Executes the runs of a comparison in this process or as jobs of a server; finished runs are not repeated."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeAlias

import msgspec
from attn_core.errors import AlreadyExists, AttnError, UnknownName, WrongState
from attn_schema.json_text import json_text, number
from attn_schema.text_files import lines_of
from attn_schema.training import JobEvent, JobState, LogLine, Metrics, TrainingConfig, TrainingJob

from attn_train.attempt import Assignment, Failed, Finished, Message
from attn_train.comparison.plan import Question, Run
from attn_train.records import Stop, StopFlag
from attn_train.settings import Layout

Say = Callable[[str], None]
PLAN = "plan.json"
POLL_SECONDS = 0.5
"""Interval between polls of the jobs of a server."""


@dataclass(frozen=True)
class Course:
    """The measurements of a run: its metrics by step, whether it finished, and the path of its model."""

    points: tuple[tuple[int, dict[str, float]], ...]
    finished: bool
    model_path: str = ""

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        found: dict[str, float] = {}
        for _, values in self.points:
            found |= values
        return found

    @property
    def steps(self) -> int:
        """The step of the last measurement."""
        return self.points[-1][0] if self.points else 0

    def curve(self, metric: str) -> list[tuple[int, float, float]]:
        """Return (step, seconds of training, value) for each measurement of the metric."""
        found, seconds = [], 0.0
        for step, values in self.points:
            seconds = values.get("elapsed_seconds", seconds)
            if metric in values:
                found.append((step, seconds, values[metric]))
        return found


Found: TypeAlias = tuple[Run, Course | AttnError]
"""A run with its measurements, or the error with which it failed."""


class Runner(Protocol):
    """Executes training runs."""

    def course(self, run: Run) -> Course | None:
        """Return the existing measurements of a run; None if it was not started, or is still training."""
        ...

    def begin(self, run: Run) -> None:
        """Start or resume a run, which trains to its end."""
        ...

    def ended(self, say: Say) -> Found:
        """Wait until one of the runs that were begun has ended, and return it."""
        ...


class ComparisonFolder:
    """The folder `home/comparisons/NAME`: the plan, the measurements of local runs, the results and the report."""

    def __init__(self, home: Path, name: str) -> None:
        self.path = home / "comparisons" / name

    def settled(self, question: Question, runs: Sequence[Run]) -> list[Run]:
        """Return the runs with the configurations of the saved plan; without one, save them as the plan.

        A budget in minutes allows another number of steps each time that it is measured, so the first plan is kept.
        Raises `AlreadyExists` if the folder has the plan of a different comparison.
        """
        path, ids = self.path / PLAN, [run.id for run in runs]
        if path.is_file():
            saved = json.loads(path.read_text("utf-8"))
            kept = {run["id"]: TrainingConfig.from_mapping(run["config"]) for run in saved["runs"]}
            same = list(kept) == ids and saved["budget"] == str(question.budget)
            if not same or any(_without_budget(kept[run.id]) != _without_budget(run.config) for run in runs):
                raise AlreadyExists(f"{self.path} has another comparison {self.path.name!r}; choose another --name")
            return [replace(run, config=kept[run.id]) for run in runs]
        listed = [run.facts() | {"config": msgspec.to_builtins(run.config)} for run in runs]
        plan = {"name": question.title, "budget": str(question.budget)}
        self.write(PLAN, json.dumps(plan | {"runs": listed}, indent=1))
        return list(runs)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file atomically, replacing an existing one."""
        self.path.mkdir(parents=True, exist_ok=True)
        fresh = self.path / f".{name}.partial"
        fresh.write_bytes(content if isinstance(content, bytes) else content.encode())
        return fresh.replace(self.path / name)


def _without_budget(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration without the fields that depend on the budget, for comparisons."""
    optimizer = config.optimizer.replace(steps=1, warmup_steps=0, min_learning_rate=None)
    optimizer = optimizer.replace(start_decay_steps=None, decay_steps=None, lr_scheduler_type="constant")
    return config.replace(optimizer=optimizer, evaluation=config.evaluation.replace(eval_steps=1, logging_steps=1))


class RunsHere:
    """Executes runs in this process, one after the other; models and checkpoints are stored like those of jobs."""

    def __init__(self, home: Path, folder: ComparisonFolder, threads: int | None) -> None:
        self._home, self._threads = home, threads
        self._folder = folder.path / "runs"
        self._begun: deque[Run] = deque()

    def begin(self, run: Run) -> None:
        """See `Runner.begin`; the run is queued and trains when `ended` is called."""
        self._begun.append(run)

    def ended(self, say: Say) -> Found:
        """See `Runner.ended`; runs train in the order in which they were begun."""
        run = self._begun.popleft()
        say(f"{run.id}: {run.config.optimizer.steps} steps")
        try:
            return run, self.train(run, say)
        except AttnError as error:
            say(f"{run.id} failed: {error.message}")
            return run, error

    def course(self, run: Run) -> Course | None:
        """See `Runner.course`; read from a file of JSON lines, of which the last one counts for each step."""
        path = self._folder / f"{run.id}.jsonl"
        if not path.is_file():
            return None
        points: dict[int, dict[str, float]] = {}
        model = ""
        for line in lines_of(path.read_text("utf-8")):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # an incomplete line of a killed process
                continue
            if "model_path" in found:
                model = found["model_path"]
            else:
                points[found["step"]] = {name: number(value) for name, value in found["values"].items()}
        return Course(tuple(sorted(points.items())), bool(model) and Path(model).is_dir(), model)

    def train(self, run: Run, say: Say) -> Course:
        """Train a run from its newest checkpoint with the same worker as jobs have.

        Raises the error with which it failed. On Ctrl-C a checkpoint is written before `KeyboardInterrupt` is raised.
        """
        from attn_train.worker import work

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{run.id}.jsonl"
        Layout(self._home).job(run.id).mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file, _stopping_on_interrupt() as flag:

            def send(message: Message) -> None:
                if isinstance(message, Metrics):
                    file.write(json_text({"step": message.step, "values": message.values}) + "\n")
                    file.flush()
                elif isinstance(message, LogLine):
                    say(f"{run.id}: {message.text}")

            assignment = Assignment(job_id=run.id, attempt=1, config=run.config, home=self._home, threads=self._threads)
            outcome = work(assignment, send, flag)
            if isinstance(outcome, Failed):
                raise outcome.error.error()
            if not isinstance(outcome, Finished):
                raise KeyboardInterrupt
            file.write(json.dumps({"model_path": outcome.model_path}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        course = self.course(run)
        if course is None:
            raise WrongState(f"run {run.id!r} recorded no measurements", run=run.id)
        return course


@contextmanager
def _stopping_on_interrupt() -> Iterator[StopFlag]:
    """Give a flag that Ctrl-C sets, so that a checkpoint is written; a second Ctrl-C interrupts at once."""
    flag = StopFlag()

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        if flag.get() is not None:
            raise KeyboardInterrupt
        flag.set(Stop.SAVE)

    try:
        before = signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # only the main thread can handle signals
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


class RunsOnServer:
    """Executes each run as a job of a server, concurrently as far as the server has room.

    `client` is attn-client's `Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._begun: dict[str, Run] = {}

    def course(self, run: Run) -> Course | None:
        """See `Runner.course`; only for jobs that succeeded or were cancelled."""
        try:
            job: TrainingJob = self._client.jobs.get(run.id)
        except UnknownName:
            return None
        return self._measured(job) if job.state in (JobState.SUCCEEDED, JobState.CANCELLED) else None

    def begin(self, run: Run) -> None:
        """Submit the job, or resume it."""
        job: TrainingJob = self._client.jobs.submit(run.config, job_id=run.id)
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            self._client.jobs.resume(run.id)
        self._begun[run.id] = run

    def ended(self, say: Say) -> Found:
        """Poll the jobs until one has ended."""
        while True:
            for run in self._begun.values():
                job: TrainingJob = self._client.jobs.get(run.id)
                if job.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
                    del self._begun[run.id]
                    return run, self._outcome(job, say)
            time.sleep(POLL_SECONDS)

    def _outcome(self, job: TrainingJob, say: Say) -> Course | AttnError:
        if job.state is JobState.FAILED and job.error is not None:
            error = job.error.error()
            say(f"{job.id} failed: {error.message}")
            return error
        if job.state is JobState.SUCCEEDED:
            say(f"{job.id}: {job.step} steps")
            return self._measured(job)
        return WrongState(f"job {job.id!r} is {job.state}; repeat the command to continue it", job=job.id)

    def _measured(self, job: TrainingJob) -> Course:
        """Return the course of a job that has ended, from its events."""
        points: dict[int, dict[str, float]] = {}
        for update in self._client.jobs.watch(job.id):
            if isinstance(update, JobEvent) and update.metrics is not None:
                points[update.metrics.step] = dict(update.metrics.values)
        return Course(tuple(sorted(points.items())), job.state is JobState.SUCCEEDED, job.model_path)


def trained(runs: Sequence[Run], runner: Runner, say: Say) -> Iterator[Found]:
    """Train all runs; yield each with its measurements or its error. A failed run does not stop the others."""
    left = 0
    for run in runs:
        found = runner.course(run)
        if found is not None and found.finished:
            yield run, found
        else:
            runner.begin(run)
            left += 1
    for ended in range(left):
        say(f"{len(runs) - left + ended} of {len(runs)} runs are done")
        yield runner.ended(say)
