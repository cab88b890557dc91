"""The training service."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import time
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from attn_core.errors import AttnError, InvalidValue, Unavailable, UnknownName
from attn_gateway import Call, Caller, Cluster, Handler, handlers_of
from attn_gateway.records import Database, ModelRecord, ModelRecords, database_url
from attn_gateway.records.artifacts import ARTIFACTS
from attn_gateway.records.database import CALL_SECONDS
from attn_gateway.records.leases import LEASE_SECONDS
from attn_gateway.settings import is_loopback
from attn_schema.cores import usable_cores
from attn_schema.methods import (
    TRAINING,
    CancelTrainingJobRequest,
    CancelTrainingJobResponse,
    DeleteTrainingJobRequest,
    DeleteTrainingJobResponse,
    EstimateTrainingJobRequest,
    EstimateTrainingJobResponse,
    GetTrainingJobRequest,
    GetTrainingJobResponse,
    Heartbeat,
    ListTrainingJobsRequest,
    ListTrainingJobsResponse,
    ResumeTrainingJobRequest,
    ResumeTrainingJobResponse,
    Row,
    SubmitTrainingJobRequest,
    SubmitTrainingJobResponse,
    WatchTrainingJobRequest,
    WatchTrainingJobResponse,
)
from attn_schema.training import JobError, JobState, TrainingConfig, TrainingJob

from attn_train.checking import Checks
from attn_train.dispatcher import Dispatcher, Host
from attn_train.job_queue import Room
from attn_train.records import JobRecord, Stop
from attn_train.settings import Layout, TrainSettings
from attn_train.stalls import AT_WORK
from attn_train.store import JobStore
from attn_train.supervisor import SupervisorSettings

if TYPE_CHECKING:
    from attn_train.access import Access

CHECKS = "attn_train.admission"
"""The module of the checks of submissions. It is imported by the first of them, in a thread, as it imports torch."""
POLL_SECONDS = 0.05


class ChangeNotifier:
    """Notifies watchers of changes to the records by any process; a single poll of the database serves all watchers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changed = asyncio.Condition()
        self.count = 0
        self.closed = False

    async def follow(self) -> None:
        """Poll the database for changes until cancelled; polling continues if it cannot be reached for a while."""
        seen: object = None
        while True:
            with contextlib.suppress(AttnError):
                version = await self._database.read(self._database.version)
                if version != seen:
                    seen = version
                    await self.wake()
            await asyncio.sleep(POLL_SECONDS)

    async def wake(self) -> None:
        """Wake all watchers."""
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def beyond(self, count: int, seconds: float) -> bool:
        """Wait up to `seconds` until `self.count` is above `count`; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.count > count)
        return self.count > count

    async def close(self) -> None:
        """Wake all watchers for the last time."""
        self.closed = True
        await self.wake()


HIGHEST_PRIORITY = 100
DEFAULT_PAGE = 100
LARGEST_PAGE = 1000
EVENTS_AT_ONCE = 200
HEARTBEAT_SECONDS = 10.0
SETTLED_SECONDS = 2 * LEASE_SECONDS
"""Grace period after the start of a server in which jobs without a live supervisor are not shown as stalled."""
SMALL_DISK = 1 << 20
"""Free bytes below which a disk is reported as full."""


class TrainingHandlers:
    """Reads and writes the records of jobs; the dispatcher acts on them."""

    def __init__(self, home: Path, settings: TrainSettings, store: JobStore, dispatcher: Dispatcher) -> None:
        self._home = home
        self._settings = settings
        self._store = store
        self._database = store.database
        self._models = ModelRecords(store.database)
        self._dispatcher = dispatcher
        self.changes = ChangeNotifier(store.database)
        self._began = time.monotonic()
        self._estimating = asyncio.Semaphore()
        self.checks = Checks()
        self.only_this_machine = False
        """Whether only this machine can connect: who calls without a token is then the user of the server itself."""

    async def submit_training_job(self, request: SubmitTrainingJobRequest, call: Call) -> SubmitTrainingJobResponse:
        """Validate and record a job, and wake the dispatcher; returns the existing job for a repeated request."""
        caller = call.caller
        config = await self._config(request, caller)
        from attn_train.admission import check_model_name_is_free, new_job_id

        if not -HIGHEST_PRIORITY <= request.priority <= HIGHEST_PRIORITY:
            raise InvalidValue.of("priority", request.priority, f"-{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}")
        if request.priority > 0:
            call.caller.require_admin("a priority above 0")
        if request.validate_only:
            await self._check(config, caller)
            return SubmitTrainingJobResponse(job=TrainingJob(config=config))
        job = await self._repeated(request.job_id, config, caller.owner)
        if job is None:
            await self._check(config, caller)
            job_id = request.job_id or new_job_id(config.model.label)
            check_model_name_is_free(job_id, self._home)
            await self._database.write(self._models.record, ModelRecord(job_id, caller.owner))
            job = await self._database.write(self._store.submit, job_id, config, caller.owner, request.priority)
            self._dispatcher.wake()
        return SubmitTrainingJobResponse(job=job.public())

    async def estimate_training_job(
        self, request: EstimateTrainingJobRequest, call: Call
    ) -> EstimateTrainingJobResponse:
        """Validate like a submission, and run a few steps in a separate process; one estimate at a time."""
        caller = call.caller
        config = await self._config(request, caller)
        from attn_train.admission import check_model_name_is_free
        from attn_train.estimate import estimated_apart

        if await self._repeated(request.job_id, config, caller.owner) is None:
            await self._check(config, caller)
            if request.job_id:
                check_model_name_is_free(request.job_id, self._home)
        async with self.checks.turn(caller.tenant), self._estimating:
            found = await estimated_apart(config, self._home, self._settings.threads)
        return EstimateTrainingJobResponse(config=config, estimate=found)

    async def get_training_job(self, request: GetTrainingJobRequest, call: Call) -> GetTrainingJobResponse:
        """Return one job."""
        job = await self._job(request.id, call)
        (shown,) = await self._database.read(self._as_shown, [job])
        return GetTrainingJobResponse(job=shown.public())

    async def list_training_jobs(self, request: ListTrainingJobsRequest, call: Call) -> ListTrainingJobsResponse:
        """Return a page of jobs; its token is the number of its last job, so that new jobs do not shift later pages."""
        if not 0 <= request.page_size <= LARGEST_PAGE:
            raise InvalidValue.of("page_size", request.page_size, f"0 to {LARGEST_PAGE}")
        token = request.page_token
        if token and not (token.isascii() and token.isdecimal() and len(token) <= 15):
            raise InvalidValue.of("page_token", token, "the next_page_token of an earlier page")
        count = request.page_size or DEFAULT_PAGE
        sees = call.caller.sees
        jobs = await self._database.read(self._store.page, int(token) if token else None, count + 1, sees)
        following = str(jobs[count - 1].number) if len(jobs) > count else ""
        shown = await self._database.read(self._as_shown, jobs[:count])
        return ListTrainingJobsResponse(jobs=tuple(job.public() for job in shown), next_page_token=following)

    async def watch_training_job(
        self, request: WatchTrainingJobRequest, call: Call
    ) -> AsyncIterator[WatchTrainingJobResponse]:
        """Stream the job, its events after `after_event_id`, and new events until the job has ended."""
        job = await self._job(request.id, call)
        after = request.after_event_id
        if not 0 <= after <= job.last_event_id:
            raise InvalidValue.of("after_event_id", after, f"0 to {job.last_event_id}, the id of the newest event")
        yield WatchTrainingJobResponse(job=job.public())
        while True:
            # Read before the events, so that no change in between is missed.
            count = self.changes.count
            events = await self._database.read(self._store.events, request.id, after, EVENTS_AT_ONCE)
            for event in events:
                yield WatchTrainingJobResponse(event=event)
                after = event.id
            if events:
                continue
            job = await self._job(request.id, call)
            if job.state.final and job.last_event_id == after:
                return
            if self.changes.closed:
                raise Unavailable(
                    "the server is shutting down; watch again from the last event received", after_event_id=after
                )
            if job.last_event_id == after and not await self.changes.beyond(count, HEARTBEAT_SECONDS):
                yield WatchTrainingJobResponse(heartbeat=Heartbeat(last_event_id=after))

    async def cancel_training_job(self, request: CancelTrainingJobRequest, call: Call) -> CancelTrainingJobResponse:
        """Record the request to stop, and notify the supervisor."""
        stop = Stop.DISCARD if request.discard else Stop.SAVE
        job = await self._database.write(self._store.request_stop, request.id, stop, call.caller.sees)
        await self._dispatcher.check_now(request.id)
        return CancelTrainingJobResponse(job=job.public())

    async def resume_training_job(self, request: ResumeTrainingJobRequest, call: Call) -> ResumeTrainingJobResponse:
        """Put a failed or cancelled job back into the queue."""
        job = await self._database.write(self._store.requeue, request.id, call.caller.sees)
        self._dispatcher.wake()
        return ResumeTrainingJobResponse(job=job.public())

    async def delete_training_job(self, request: DeleteTrainingJobRequest, call: Call) -> DeleteTrainingJobResponse:
        """Delete a job's record and files, after stopping it if `cancel` is set; its finished model is kept."""
        tenant = call.caller.sees
        if request.cancel:
            await self._database.write(self._store.request_stop, request.id, Stop.DISCARD, tenant)
            await self._dispatcher.check_now(request.id)
            await self._until_final(request.id, call)
        await self._job(request.id, call)  # soon refused if the records cannot be read
        model = await asyncio.to_thread(self._delete, request.id, tenant)
        await self.changes.wake()
        return DeleteTrainingJobResponse(kept_model_path=model)

    def _delete(self, job_id: str, tenant: str | None) -> str:
        layout = Layout(self._home)
        folder, model = layout.job(job_id), layout.model(job_id)
        if ARTIFACTS in os.environ and self._store.get(job_id, tenant).state.final:
            from attn_train.object_checkpoints import checkpoints_of

            # Before the record, without which nothing would show that there may be checkpoints.
            checkpoints_of(job_id, self._home, os.environ[ARTIFACTS]).remove()

        def away() -> None:
            # Renaming is atomic, so that a new job with the same id never finds a part of the files.
            if folder.exists():
                folder.rename(layout.removed(job_id))

        self._store.delete(job_id, tenant, away)
        layout.sweep()
        record = self._models.find(job_id)
        if not model.exists() and record is not None and not record.artifact:
            # The name becomes free again, also for other tenants.
            self._models.forget(job_id)
        return str(model) if model.exists() else ""

    async def _until_final(self, job_id: str, call: Call) -> None:
        """Wait until a job that was asked to stop has ended."""
        while True:
            count = self.changes.count
            if (await self._job(job_id, call)).state.final:
                return
            if self.changes.closed:
                raise Unavailable("the server is shutting down; the job was asked to stop but is not deleted")
            await self.changes.beyond(count, HEARTBEAT_SECONDS)

    async def _job(self, job_id: str, call: Call) -> JobRecord:
        return await self._database.read(self._store.get, job_id, call.caller.sees)

    def _as_shown(self, jobs: list[JobRecord]) -> list[JobRecord]:
        """Return the jobs with their queue positions, and with the state STALLED if nothing can be recorded of them."""
        plan = self._dispatcher.schedule

        def placed(job: JobRecord) -> JobRecord:
            if job.state is not JobState.QUEUED:
                return job
            position, why = plan.position(job.id), plan.waiting.get(job.id, "")
            return msgspec.structs.replace(job, queue_position=position, waiting_for=why)

        return self._with_stalls([placed(job) for job in jobs])

    def _with_stalls(self, jobs: list[JobRecord]) -> list[JobRecord]:
        """Return the jobs; those at work whose supervisor's lease has expired are shown, not recorded, as STALLED."""
        if time.monotonic() - self._began < SETTLED_SECONDS:
            # Supervisors that kept running while the server was down need time to renew their leases.
            return jobs
        overdue = self._store.unattended_seconds([job.id for job in jobs if job.state in AT_WORK])
        return [self._stalled(job, overdue[job.id]) if job.id in overdue else job for job in jobs]

    def _stalled(self, job: JobRecord, seconds: float) -> JobRecord:
        free = shutil.disk_usage(self._home).free
        full = f"; the disk of {self._home} has {free} bytes left" if free < SMALL_DISK else ""
        message = f"the job has recorded nothing for {seconds + LEASE_SECONDS:.0f} seconds{full}"
        return msgspec.structs.replace(job, state=JobState.STALLED, error=JobError.of(Unavailable(message)))

    def _access(self, caller: Caller) -> Access:
        from attn_train.access import Access

        trusted = self.only_this_machine or caller.owner != ""
        return Access(self._home, self._settings, self._models, caller.sees, trusted=trusted)

    async def _config(
        self, request: SubmitTrainingJobRequest | EstimateTrainingJobRequest, caller: Caller
    ) -> TrainingConfig:
        """Return the configuration of a request, with the fields that follow from its base model."""
        admission = await asyncio.to_thread(import_module, CHECKS)
        from attn_train.base_model import completed
        from attn_train.model import resolved

        config = resolved(request.config)
        if config.on_policy.rollout_server:
            caller.require_admin("rollout_server")
        if request.job_id:
            admission.check_job_id(request.job_id)
        async with self.checks.turn(caller.tenant):
            await self.checks.run(self._access(caller).require, config)
            return await self.checks.run(completed, config, home=self._home)

    async def _check(self, config: TrainingConfig, caller: Caller) -> None:
        from attn_train.admission import check_config

        async with self.checks.turn(caller.tenant):
            await self.checks.run(check_config, config, home=self._home)

    async def _repeated(self, job_id: str, config: TrainingConfig, owner: str) -> JobRecord | None:
        """Return the job of an earlier identical request, else None; raises `AlreadyExists` if its content differs."""
        if not job_id:
            return None
        try:
            await self._database.read(self._store.get, job_id)
        except UnknownName:
            return None
        return await self._database.write(self._store.submit, job_id, config, owner)


class TrainingGrpc:
    """The training service, with jobs as processes of this machine, or as actors of the gateway's Ray cluster."""

    names = (TRAINING,)

    def __init__(self, cluster: Cluster, settings: TrainSettings | None = None) -> None:
        self._cluster = cluster
        self._settings = settings or TrainSettings.from_environment()
        self._database = database_url(cluster.home)
        self._store = JobStore(Database(self._database, patience=CALL_SECONDS))
        self._dispatcher = Dispatcher(
            self._store, self.make_host, self._settings, lambda: cluster.settings.engine.tenant_weights
        )
        self._handlers = TrainingHandlers(cluster.home, self._settings, self._store, self._dispatcher)
        self._tasks: list[asyncio.Task[None]] = []

    def handlers(self) -> dict[Row, Handler]:
        """The handlers of the calls."""
        return handlers_of(TRAINING, self._handlers)

    def listens(self, address: str, *, chosen: bool) -> None:
        """Note who can connect to the gateway; see `attn_gateway.service.KnowsItsAddress`."""
        del chosen
        self._handlers.only_this_machine = is_loopback(address.rpartition(":")[0])

    async def start(self) -> None:
        """Start to follow the records; unfinished jobs continue in the background."""
        await asyncio.to_thread(Layout(self._cluster.home).sweep)
        for work in (self._handlers.changes.follow(), self._dispatcher.run()):
            self._tasks.append(asyncio.create_task(work))

    async def stop(self, shutdown_timeout: float) -> None:
        """Suspend jobs that cannot run without this server; they continue when it starts again."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._handlers.changes.close()
        self._handlers.checks.close()
        await self._dispatcher.stop(shutdown_timeout)
        self._store.close()

    async def make_host(self) -> Host:
        """Return a host that runs supervisors and workers on this machine, or on Ray, which is started or joined."""
        settings = self._cluster.settings
        if settings.uses_ray:
            await self._cluster.start()
            from attn_train.on_ray import RayHost

            return RayHost(self.supervisor_settings(), private=settings.address is None)
        from attn_train.processes import Gpus, LocalHost, ProcessBackend

        gpus = Gpus()
        room = Room(jobs=math.inf, cpus=settings.cpus or usable_cores(), gpus=gpus.count)
        return LocalHost(self.supervisor_settings(), ProcessBackend(gpus), room)

    def supervisor_settings(self) -> SupervisorSettings:
        """Return the settings of supervisors."""
        return SupervisorSettings(
            home=self._cluster.home,
            database=self._database,
            artifacts=os.environ.get(ARTIFACTS),
            threads=self._settings.threads,
            stall_timeout=self._settings.stall_timeout,
            gpus=self._settings.gpus,
            log_to=self._settings.log_to,
        )
