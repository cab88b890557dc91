# ruff: noqa: ARG002, N802 - names and arguments of calls are the interface's
"""The calls of TrainingService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceServicer
from attn_core.errors import InvalidValue, Unavailable, UnknownName
from attn_gateway.call import Context

from attn_train.admission.check import check_job_id, check_model_name_is_free, check_spec, new_job_id
from attn_train.jobs.record import Job
from attn_train.jobs.store import JobStore
from attn_train.loop.stop import Stop
from attn_train.service.changes import Changes
from attn_train.service.dispatcher import Dispatcher
from attn_train.service.job_messages import event_message, job_message
from attn_train.service.spec_messages import spec_message, spec_of
from attn_train.settings import TrainSettings
from attn_train.spec import TrainingSpec

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000
EVENTS_AT_ONCE = 200
HEARTBEAT_SECONDS = 10.0
LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


class TrainingServicer(TrainingServiceServicer):
    """Answers from the records; the dispatcher does what they say."""

    def __init__(self, home: Path, settings: TrainSettings, store: JobStore, dispatcher: Dispatcher) -> None:
        self._home = home
        self._settings = settings
        self._store = store
        self._dispatcher = dispatcher
        self.changes = Changes(store.path)

    async def SubmitTrainingJob(
        self, request: pb.SubmitTrainingJobRequest, context: Context
    ) -> pb.SubmitTrainingJobResponse:
        """Check, record, start."""
        local = context.peer().startswith(LOCAL_PEERS)
        spec = spec_of(request.spec)
        if request.job_id:
            check_job_id(request.job_id)
        if request.validate_only:
            await self._check(spec, local=local)
            return pb.SubmitTrainingJobResponse(job=pb.TrainingJob(spec=spec_message(spec)))
        job = await self._repeated(request.job_id, spec)
        if job is None:
            await self._check(spec, local=local)
            job_id = request.job_id or new_job_id(spec.model.label)
            check_model_name_is_free(job_id, self._home)
            job = await asyncio.to_thread(self._store.submit, job_id, spec)
            self._dispatcher.wake()
        return pb.SubmitTrainingJobResponse(job=job_message(job))

    async def GetTrainingJob(self, request: pb.GetTrainingJobRequest, context: Context) -> pb.GetTrainingJobResponse:
        """One job."""
        return pb.GetTrainingJobResponse(job=job_message(await self._job(request.id)))

    async def ListTrainingJobs(
        self, request: pb.ListTrainingJobsRequest, context: Context
    ) -> pb.ListTrainingJobsResponse:
        """A page; its token is the number of its last job, so jobs that come meanwhile shift nothing."""
        if not 0 <= request.page_size <= LARGEST_PAGE:
            raise InvalidValue.of("page_size", request.page_size, f"0 to {LARGEST_PAGE}")
        token = request.page_token
        if token and not (token.isascii() and token.isdecimal() and len(token) <= 15):
            raise InvalidValue.of("page_token", token, "next_page_token of an earlier page")
        count = request.page_size or DEFAULT_PAGE
        jobs = await asyncio.to_thread(self._store.page, int(token) if token else None, count + 1)
        following = str(jobs[count - 1].number) if len(jobs) > count else ""
        return pb.ListTrainingJobsResponse(jobs=[job_message(job) for job in jobs[:count]], next_page_token=following)

    async def WatchTrainingJob(
        self, request: pb.WatchTrainingJobRequest, context: Context
    ) -> AsyncIterator[pb.WatchTrainingJobResponse]:
        """The job, its events from the one asked for, and what comes."""
        job = await self._job(request.id)
        after = request.after_event_id
        if not 0 <= after <= job.last_event:
            raise InvalidValue.of("after_event_id", after, f"0 to {job.last_event}, the id of the newest event")
        yield pb.WatchTrainingJobResponse(job=job_message(job))
        while True:
            # Read before the events, so that nothing can slip in between.
            count = self.changes.count
            events = await asyncio.to_thread(self._store.events, request.id, after, EVENTS_AT_ONCE)
            for event in events:
                yield pb.WatchTrainingJobResponse(event=event_message(event))
                after = event.id
            if events:
                continue
            job = await self._job(request.id)
            if job.state.final and job.last_event == after:
                return
            if self.changes.closed:
                raise Unavailable("the server stops; watch again from the last event seen", after_event_id=after)
            if job.last_event == after and not await self.changes.beyond(count, HEARTBEAT_SECONDS):
                yield pb.WatchTrainingJobResponse(heartbeat=pb.Heartbeat(last_event_id=after))

    async def CancelTrainingJob(
        self, request: pb.CancelTrainingJobRequest, context: Context
    ) -> pb.CancelTrainingJobResponse:
        """Record the wish, and pass it on."""
        stop = Stop.DISCARD if request.discard else Stop.SAVE
        job = await asyncio.to_thread(self._store.request_stop, request.id, stop)
        await self._dispatcher.nudge(request.id)
        return pb.CancelTrainingJobResponse(job=job_message(job))

    async def ResumeTrainingJob(
        self, request: pb.ResumeTrainingJobRequest, context: Context
    ) -> pb.ResumeTrainingJobResponse:
        """Queue it again."""
        job = await asyncio.to_thread(self._store.requeue, request.id)
        self._dispatcher.wake()
        return pb.ResumeTrainingJobResponse(job=job_message(job))

    async def _job(self, job_id: str) -> Job:
        return await asyncio.to_thread(self._store.get, job_id)

    async def _check(self, spec: TrainingSpec, *, local: bool) -> None:
        await asyncio.to_thread(check_spec, spec, home=self._home, settings=self._settings, local=local)

    async def _repeated(self, job_id: str, spec: TrainingSpec) -> Job | None:
        """The job that an earlier call of the same content made; raises AlreadyExists for one of other content."""
        if not job_id:
            return None
        try:
            await self._job(job_id)
        except UnknownName:
            return None
        return await asyncio.to_thread(self._store.submit, job_id, spec)
