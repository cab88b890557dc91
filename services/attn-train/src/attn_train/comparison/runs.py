"""The runs of a comparison: in this process, or as jobs of a server; what is finished is not run again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
from attn_core.errors import AlreadyExists, AttnError, WrongState
from attn_schema.training import JobEvent, JobState, LogLine, Metrics, TrainingConfig, TrainingJob

from attn_train.attempt import Assignment, Failed, Finished, Message
from attn_train.comparison.plan import Question, Run
from attn_train.records import Stop, StopFlag
from attn_train.settings import Layout

Say = Callable[[str], None]
PLAN = "plan.json"


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

    def curve(self, metric: str) -> list[tuple[int, float, float]]:
        """(step, seconds of training, value) where the metric was measured."""
        found, seconds = [], 0.0
        for step, values in self.points:
            seconds = values.get("elapsed_seconds", seconds)
            if metric in values:
                found.append((step, seconds, values[metric]))
        return found


class Runner(Protocol):
    """Where runs train."""

    def course(self, run: Run) -> Course | None:
        """What is there of a run; None before it was started."""
        ...

    def train(self, run: Run, say: Say) -> Course:
        """Start a run, or go on with it, to its end; raises the error with which it failed."""
        ...


class ComparisonFolder:
    """`home/comparisons/NAME`: the plan, the measurements of runs in this process, results and report."""

    def __init__(self, home: Path, name: str) -> None:
        self.path = home / "comparisons" / name

    def settled(self, question: Question, runs: Sequence[Run]) -> list[Run]:
        """The runs, with the configurations of the plan that is there; else they become the plan.

        Minutes buy other steps each time they are measured; what was planned once is what is run. Raises
        `AlreadyExists` where the folder has the plan of another question.
        """
        path, ids = self.path / PLAN, [run.id for run in runs]
        if path.is_file():
            saved = json.loads(path.read_text("utf-8"))
            kept = {run["id"]: TrainingConfig.from_mapping(run["config"]) for run in saved["runs"]}
            same = list(kept) == ids and saved["budget"] == question.spent
            if not same or any(_asked(kept[run.id]) != _asked(run.config) for run in runs):
                raise AlreadyExists(f"there is another comparison {self.path.name!r} in {self.path}; choose a --name")
            return [replace(run, config=kept[run.id]) for run in runs]
        listed = [run.facts() | {"config": msgspec.to_builtins(run.config)} for run in runs]
        self.write(PLAN, json.dumps({"name": question.title, "budget": question.spent, "runs": listed}, indent=1))
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

    def __init__(self, home: Path, folder: ComparisonFolder, threads: int | None) -> None:
        self._home, self._threads = home, threads
        self._folder = folder.path / "runs"

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

    def train(self, run: Run, say: Say) -> Course:
        """By the worker that jobs have, from the newest checkpoint; Ctrl-C writes one first."""
        from attn_train.worker import work

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{run.id}.jsonl"
        Layout(self._home).job(run.id).mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file, _stopping_on_interrupt() as flag:

            def send(message: Message) -> None:
                if isinstance(message, Metrics):
                    file.write(json.dumps({"step": message.step, "values": message.values}) + "\n")
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
    """A job of a server each, all submitted first, so that they train side by side; `client` is attn-client's."""

    def __init__(self, client: Any, runs: Sequence[Run]) -> None:
        self._client = client
        self._jobs = {run.id: client.jobs.submit(run.config, job_id=run.id) for run in runs}
        for job_id, job in self._jobs.items():
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                self._jobs[job_id] = client.jobs.resume(job_id)

    def course(self, run: Run) -> Course | None:
        """Of a job that has ended well; others are watched."""
        job: TrainingJob = self._jobs[run.id]
        return self.train(run, lambda _: None) if job.state is JobState.SUCCEEDED else None

    def train(self, run: Run, say: Say) -> Course:
        """Watch the job to its end."""
        points: dict[int, dict[str, float]] = {}
        for update in self._client.jobs.watch(run.id):
            if isinstance(update, JobEvent) and update.metrics is not None:
                points[update.metrics.step] = dict(update.metrics.values)
            elif isinstance(update, JobEvent) and update.log is not None:
                say(f"{run.id}: {update.log.text}")
        job: TrainingJob = self._client.jobs.get(run.id)
        if job.state is JobState.FAILED and job.error is not None:
            raise job.error.error()
        if job.state is not JobState.SUCCEEDED:
            raise WrongState(f"job {run.id!r} is {job.state}; compare again to go on with it", job=run.id)
        return Course(tuple(sorted(points.items())), finished=True, model_path=job.model_path)


def trained(runs: Sequence[Run], runner: Runner, say: Say) -> Iterator[tuple[Run, Course | AttnError]]:
    """Each run with what was measured of it, or the error with which it failed; the others go on."""
    for number, run in enumerate(runs, 1):
        found = runner.course(run)
        if found is not None and found.finished:
            yield run, found
            continue
        say(f"{number}/{len(runs)} {run.id}: {run.config.optimizer.steps} steps")
        try:
            yield run, runner.train(run, say)
        except AttnError as error:
            say(f"{run.id} failed: {error.message}")
            yield run, error
