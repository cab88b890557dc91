"""Keeps every unfinished job supervised, up to the operator's number of concurrent jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from attn_schema.training import JobState

from attn_train.records import JobRecord
from attn_train.store import JobStore


class Host(Protocol):
    """Runs supervisors, one a job. Methods may block for seconds and are called from threads, one at a time."""

    def ensure(self, job_id: str) -> None:
        """Start the job's supervisor unless it is running."""
        ...

    def alive(self, job_id: str) -> bool:
        """Whether the job's supervisor is running."""
        ...

    def check_now(self, job_id: str) -> None:
        """Let the job's supervisor, if it is running, read the record now."""
        ...

    def stop(self, shutdown_timeout: float) -> None:
        """Leave: jobs that cannot go on without this process are suspended within about `shutdown_timeout` seconds."""
        ...


CHECK_SECONDS = 2.0
"""How soon a dead supervisor is replaced."""

log = logging.getLogger(__name__)


class Dispatcher:
    """Starts supervisors: at once for jobs that were running, for queued ones when fewer than the maximum run.

    `make_host` is awaited when the first job needs a supervisor, as that may start Ray.
    """

    def __init__(self, store: JobStore, make_host: Callable[[], Awaitable[Host]], max_concurrent_jobs: int) -> None:
        self._store = store
        self._make_host = make_host
        self._max_concurrent = max_concurrent_jobs
        self._host: Host | None = None
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._woken.clear()
            try:
                await self._look()
            except Exception:
                log.exception("jobs could not be looked after; trying again")
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def wake(self) -> None:
        """Look for jobs now, as one was submitted or has ended."""
        self._woken.set()

    async def check_now(self, job_id: str) -> None:
        """Let the job's supervisor look at the record now."""
        if self._host is not None:
            await asyncio.to_thread(self._host.check_now, job_id)
        self.wake()

    async def stop(self, shutdown_timeout: float) -> None:
        """Leave the jobs as the host leaves them."""
        if self._host is not None:
            await asyncio.to_thread(self._host.stop, shutdown_timeout)

    async def _look(self) -> None:
        jobs = await asyncio.to_thread(self._store.unfinished)
        if not jobs:
            return
        if self._host is None:
            self._host = await self._make_host()
        await asyncio.to_thread(self._start_supervisors, self._host, jobs)

    def _start_supervisors(self, host: Host, jobs: list[JobRecord]) -> None:
        waiting = [job for job in jobs if job.state is JobState.QUEUED]
        at_work = [job for job in jobs if job.state is not JobState.QUEUED]
        for job in at_work:
            host.ensure(job.id)
        room = self._max_concurrent - len(at_work)
        for job in waiting[: max(room, 0)]:
            host.ensure(job.id)
