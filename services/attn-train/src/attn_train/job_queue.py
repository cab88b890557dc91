"""Scheduling: which queued job starts next, which running jobs are preempted for it, and why the others wait.

Jobs of a higher priority come first, and preempt running jobs of a lower priority. Among equal priorities, jobs are
ordered by their tenant's share of running resources divided by its weight, then by its use in the last day divided by
its weight, then by age. A job that does not fit blocks those after it, so that small jobs cannot starve a large one;
a job that would not even fit into the empty cluster is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attn_schema.training import JobState

from attn_train.records import JobRecord
from attn_train.stalls import AT_WORK

WINDOW_SECONDS = 86400.0
"""The period over which the past use of tenants counts."""
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Room:
    """Resources that jobs need or the machine or cluster has: concurrent jobs, CPUs and GPUs."""

    jobs: float = 1.0
    cpus: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: Room) -> Room:
        return Room(jobs=self.jobs + other.jobs, cpus=self.cpus + other.cpus, gpus=self.gpus + other.gpus)

    def without(self, other: Room) -> Room:
        """Return these resources less `other`."""
        return Room(jobs=self.jobs - other.jobs, cpus=self.cpus - other.cpus, gpus=self.gpus - other.gpus)

    def lacks(self, needed: Room) -> str:
        """Return, as text, what is missing for `needed`; empty if it fits."""
        if needed.jobs > self.jobs + ROUNDING:
            return "a running job to end (ATTN_TRAIN_JOBS)"
        for name, has, wants in (("CPUs", self.cpus, needed.cpus), ("GPUs", self.gpus, needed.gpus)):
            if wants > has + ROUNDING:
                return f"{wants:g} {name}, of which {max(has, 0):g} are free"
        return ""

    def share_of(self, whole: Room) -> float:
        """Return the largest share of any resource of `whole` (dominant resource fairness, Ghodsi et al. 2011)."""
        pairs = ((self.jobs, whole.jobs), (self.cpus, whole.cpus), (self.gpus, whole.gpus))
        return max((mine / all_ for mine, all_ in pairs if all_ > 0), default=0.0)


@dataclass(kw_only=True)
class Schedule:
    """Scheduling decisions: ids of jobs to start, jobs to suspend with the reason, and, in queue order, jobs that wait
    with what they wait for."""

    start: list[str] = field(default_factory=list)
    suspend: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)

    def position(self, job_id: str) -> int:
        """Return the position of a job in the queue, from 1; 0 for other jobs."""
        return [*self.waiting].index(job_id) + 1 if job_id in self.waiting else 0


def scheduled(
    jobs: Sequence[JobRecord],
    capacity: Room,
    needs: Callable[[JobRecord], Room],
    weights: Mapping[str, float],
    used: Mapping[str, float],
) -> Schedule:
    """Decide which of the unfinished `jobs` to start and to suspend; see the module's description.

    `weights` are those of tenants, 1 by default; `used` are the seconds that each owner's jobs ran recently.
    """
    working = [job for job in jobs if job.state is not JobState.QUEUED]
    taken = _sum(map(needs, working))
    mine = {owner: _sum(needs(job) for job in working if job.owner == owner) for owner in {job.owner for job in jobs}}
    found = Schedule()
    blocked = ""

    def order(job: JobRecord) -> tuple[float, ...]:
        weight = weights.get(job.owner, 1.0)
        return (
            -job.priority,
            mine[job.owner].share_of(capacity) / weight,
            used.get(job.owner, 0.0) / weight,
            job.number,
        )

    queued = sorted((job for job in jobs if job.state is JobState.QUEUED), key=order)
    while queued:
        job = queued.pop(0)
        needed = needs(job)
        if never := capacity.lacks(needed):
            found.waiting[job.id] = f"the cluster is too small: {never}"
            continue
        lacking = blocked or capacity.without(taken).lacks(needed)
        if not lacking:
            found.start.append(job.id)
            taken, mine[job.owner] = taken + needed, mine[job.owner] + needed
            # The tenant's share has grown, so its other jobs may now come later.
            queued.sort(key=order)
            continue
        found.waiting[job.id] = f"waits for {lacking}"
        if not blocked:
            blocked = "the jobs before it"
            found.suspend |= _preempted(job, needed, working, capacity.without(taken), needs)
    return found


def _preempted(
    job: JobRecord, needed: Room, working: Sequence[JobRecord], free: Room, needs: Callable[[JobRecord], Room]
) -> dict[str, str]:
    """Return the running jobs of a lower priority to preempt for `job`, with the reason: lowest priority first, then
    newest first; none if all of them together would not make enough room."""
    preempted = {}
    for lower in sorted(working, key=lambda found: (found.priority, -found.number)):
        if not free.lacks(needed):
            break
        if lower.priority < job.priority:
            free = free + needs(lower)
            # A job that is being cancelled ends anyway.
            if lower.state in AT_WORK:
                preempted[lower.id] = f"makes room for a job of priority {job.priority}"
    return {} if free.lacks(needed) else preempted


def _sum(rooms: Iterable[Room]) -> Room:
    return sum(rooms, start=Room(jobs=0.0))
