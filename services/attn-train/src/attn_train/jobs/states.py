"""Which state may follow which."""

from __future__ import annotations

from attn_core.errors import WrongState

from attn_train.jobs.record import JobState

S = JobState
ENDS = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})

NEXT: dict[JobState, frozenset[JobState]] = {
    S.QUEUED: frozenset({S.STARTING, S.CANCELLING, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.RECOVERING, S.CANCELLING, S.QUEUED}) | ENDS,
    S.RUNNING: frozenset({S.RECOVERING, S.CANCELLING, S.QUEUED}) | ENDS,
    S.RECOVERING: frozenset({S.RUNNING, S.RECOVERING, S.CANCELLING, S.QUEUED}) | ENDS,
    # A run may end by itself before it hears that it should stop.
    S.CANCELLING: ENDS,
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset({S.QUEUED}),
    S.CANCELLED: frozenset({S.QUEUED}),
}


def require_step(job_id: str, current: JobState, following: JobState) -> None:
    """Raises WrongState unless `following` may come after `current`."""
    if following not in NEXT[current]:
        message = f"job {job_id!r} is {current}; it cannot become {following}"
        raise WrongState(message, job=job_id, state=current)
