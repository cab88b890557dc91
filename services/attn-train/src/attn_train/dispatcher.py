"""Dispatches jobs: starts a supervisor for each job that has room, queues the others, and preempts jobs for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from attn_core.errors import Unavailable
from attn_schema.device import AUTO
from attn_schema.training import JobState
from msgspec import structs

from attn_train.job_queue import WINDOW_SECONDS, Room, Schedule, scheduled
from attn_train.records import JobRecord
from attn_train.settings import TrainSettings
from attn_train.store import JobStore


class Host(Protocol):
    """Runs supervisors, one per job. Methods may block for seconds; they are called from threads, one at a time."""

    def ensure(self, job_id: str) -> None:
        """Start the job's supervisor unless it is running."""
        ...

    def alive(self, job_id: str) -> bool:
        """Whether the job's supervisor is running."""
        ...

    def check_now(self, job_id: str) -> None:
        """Make the job's supervisor, if it is running, read the record now."""
        ...

    def suspend(self, job_id: str, why: str) -> None:
        """Make the job's supervisor stop the worker with a checkpoint and put the job back into the queue."""
        ...

    def room(self) -> Room:
        """Return the total resources for jobs, those of running jobs included."""
        ...

    def stop(self, shutdown_timeout: float) -> None:
        """Shut down: suspend jobs that cannot run without this process, within about `shutdown_timeout` seconds."""
        ...


CHECK_SECONDS = 2.0
"""Interval between checks, after which a dead supervisor is replaced."""

log = logging.getLogger(__name__)


class Dispatcher:
    """Starts supervisors: at once for jobs that were running, in the order of `scheduled` for queued ones.

    `make_host` is awaited when the first job needs a supervisor, as that may start Ray. `weights` returns the
    scheduling weights of tenants; those not in it have 1. The attribute `schedule` is the last decision.
    """

    def __init__(
        self,
        store: JobStore,
        make_host: Callable[[], Awaitable[Host]],
        settings: TrainSettings,
        weights: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._store = store
        self._make_host = make_host
        self._settings = settings
        self._weights = weights
        self.schedule = Schedule()
        self._started: set[tuple[str, int]] = set()
        self._host: Host | None = None
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Dispatch jobs until cancelled."""
        while True:
            self._woken.clear()
            try:
                await self._dispatch()
            except Unavailable as error:
                log.warning("the jobs could not be dispatched; trying again: %s", error.message)
            except Exception:
                log.exception("the jobs could not be dispatched; trying again")
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def wake(self) -> None:
        """Check for jobs now, after one was submitted or has ended."""
        self._woken.set()

    async def check_now(self, job_id: str) -> None:
        """Make the job's supervisor read the record now."""
        if self._host is not None:
            await asyncio.to_thread(self._host.check_now, job_id)
        self.wake()

    async def stop(self, shutdown_timeout: float) -> None:
        """Shut down the host; see `Host.stop`."""
        if self._host is not None:
            await asyncio.to_thread(self._host.stop, shutdown_timeout)

    async def _dispatch(self) -> None:
        jobs = await self._store.database.read(self._store.unfinished)
        if not jobs:
            self.schedule = Schedule()
            return
        if self._host is None:
            self._host = await self._make_host()
        await asyncio.to_thread(self._apply_schedule, self._host, jobs)

    def _apply_schedule(self, host: Host, jobs: list[JobRecord]) -> None:
        # A job that was started stays queued in the records until its supervisor is running.
        self._started &= {(job.id, job.attempt) for job in jobs if job.state is JobState.QUEUED}
        begun = {job_id for job_id, _ in self._started}
        seen = [structs.replace(job, state=JobState.STARTING) if job.id in begun else job for job in jobs]
        plan = self._planned(host, seen) if any(job.state is JobState.QUEUED for job in seen) else Schedule()
        attempts = {job.id: job.attempt for job in jobs}
        self._started |= {(job_id, attempts[job_id]) for job_id in plan.start}
        for job_id in [*(job.id for job in seen if job.state is not JobState.QUEUED), *plan.start]:
            host.ensure(job_id)
        for job_id, why in plan.suspend.items():
            if job_id not in begun:
                host.suspend(job_id, f"{why}; it continues when there is room again")
        self.schedule = plan

    def _planned(self, host: Host, jobs: list[JobRecord]) -> Schedule:
        room = host.room()
        capacity = replace(room, jobs=min(room.jobs, self._settings.max_concurrent_jobs))
        needs = partial(needed, gpus=self._settings.gpus if capacity.gpus else 0.0)
        return scheduled(jobs, capacity, needs, self._weights(), self._store.used_seconds(WINDOW_SECONDS))


def needed(job: JobRecord, gpus: float) -> Room:
    """Return the resources that a job needs: one CPU per worker, and on a CUDA device `gpus` of a GPU per worker."""
    workers, device = job.config.workers, job.config.device
    return Room(cpus=workers, gpus=workers * gpus if device == AUTO or device.startswith("cuda") else 0.0)
