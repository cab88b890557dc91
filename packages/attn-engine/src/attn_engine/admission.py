"""Admission control: which requests may wait, and which cannot be completed before their deadline.

Computing a request whose deadline has passed delays the requests that can still meet theirs. A request is therefore
refused if, at the measured speed of the engine, the tokens to be computed before it leave it too little time; under
overload the engine then computes only requests that can be completed in time.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_core.errors import AlreadyExists, OutOfCapacity
from attn_schema import EngineConfig

from attn_engine.request import Request

DECAY = 0.95
"""The factor by which the weight of a measured step decays with each later step."""
MIN_STEPS = 5
"""The number of steps that are measured before any request is refused because of its deadline."""
OUTLIER = 4.0
"""A measured step counts as at most this many times its expected duration."""
MIN_RETRY_SECONDS = 0.05
LOOK_SECONDS = 0.05
"""Interval at which waiting requests are looked through for hopeless ones: thousands may wait."""
MIN_PLANNED_SHARE, MAX_PLANNED_SHARE = 0.3, 0.9
"""The smallest and largest planned share: the fraction of the time until its deadline within which a request that must
wait is planned to complete. The rest is a margin, also for transport to and from the engine, which no step measures."""
MISS_FACTOR, MET_INCREMENT = 0.95, 0.002
"""The factor that a missed deadline applies to the planned share, and the amount that a met deadline adds to it. In
equilibrium about 4 % of the deadlines are missed."""
MAX_REMEMBERED = 256
"""The number of requests completed in time that are kept, in case the caller turns out to have cancelled them."""
LATE_CANCELLATION = 0.25
"""A cancellation with at most this fraction of the time left counts as a missed deadline; an earlier one does not."""


class StepCost:
    """The seconds of a step as `fixed + per_token * tokens`: a least-squares fit in which recent steps weigh more."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._line = (0.0, 0.0)

    def measured(self, tokens: int, seconds: float) -> None:
        """Record the duration in seconds of a step that computed `tokens` tokens."""
        if self.steps >= MIN_STEPS:
            # One slow step may be an outlier (the machine was busy); a lasting slowdown is learned over several steps.
            seconds = min(seconds, OUTLIER * self.seconds(tokens)) or seconds
        self.steps += 1
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(DECAY * old + value for old, value in zip(self._sums, new, strict=True))
        count, total, time, squares, products = self._sums
        spread = count * squares - total * total
        slope = (count * products - total * time) / spread if spread > 1e-9 * count * squares else 0.0
        # Neither the fixed cost nor the cost per token may be negative.
        slope = min(max(slope, 0.0), time / total if total else 0.0)
        self._line = (time - slope * total) / count, slope

    def seconds(self, tokens: float, steps: float = 1.0) -> float:
        """The expected seconds of `steps` steps that compute `tokens` tokens in all."""
        fixed, per_token = self._line
        return fixed * steps + per_token * tokens


@dataclass(eq=False)
class _Entry:
    """An admitted request: `prompt` and `new` are the prompt and completion tokens that are still to be computed.

    `max_new` is the initial value of `new`. `due` is the time by which it is planned to end, at or before its deadline.
    `given_up` says that it was refused after it had waited, because the engine became slower.
    """

    tenant: str
    priority: int
    deadline: float
    prompt: int
    new: int
    sequences: int
    max_new: int
    arrived: float
    due: float = math.inf
    running: bool = False
    given_up: bool = False


@dataclass
class _Work:
    """The tokens and sequences that are computed before a request."""

    prompt: float = 0.0
    new: float = 0.0
    sequences: float = 0.0

    def add(self, entries: Iterable[_Entry], share: float = 1.0) -> None:
        """Add the work of these requests, multiplied by `share`."""
        for entry in entries:
            self.prompt += share * entry.prompt
            self.new += share * entry.new
            self.sequences += share * entry.sequences


class AdmissionControl:
    """Tracks waiting and running requests and the measured speed of the engine. Thread-safe.

    A request is expected to generate the same fraction of its maximum number of tokens as recent requests did.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._max_sequences, self._max_batched = config.batch_sizes
        self._limit = config.max_queued_requests
        self._weights: Mapping[str, float] = config.tenant_weights
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._waiting: Counter[str] = Counter()
        self._used_share = 1.0
        self._planned_share = MAX_PLANNED_SHARE
        self._met: dict[str, bool] = {}
        self._looked = -math.inf
        self.cost = StepCost()
        self.refused = 0
        """The number of requests that were refused because of their deadline."""

    def admit(self, request: Request, max_new_tokens: int, now: float) -> None:
        """Add a request to those that wait; `now`, in seconds, is on the clock of the deadlines.

        Raises `AlreadyExists` for an id in use, and `OutOfCapacity` if the queue is full or the deadline cannot be met;
        its `retry_seconds` says after how long it could be met.
        """
        # A resumed request, which another engine has begun, is not refused halfway.
        resumed = request.resume is not None
        deadline = math.inf if request.deadline is None or resumed else request.deadline
        beams = getattr(request.params, "num_beams", 1)
        width = max(request.n, beams)
        known = sum(len(partial.token_ids) for partial in request.resume.received) if request.resume else 0
        new = max(max_new_tokens * width - known, 0)
        prompt = len(request.token_ids) + known - (request.state.tokens if request.state else 0)
        entry = _Entry(request.tenant, request.priority, deadline, prompt, new, width, new, now, deadline)
        with self._lock:
            if request.id in self._entries:
                raise AlreadyExists(f"a request with the id {request.id!r} is running", id=request.id)
            if not resumed:
                self._require_room(request.tenant)
            late = self._lateness(entry, now)
            if late > 0:
                self.refused += 1
                raise _too_late(late)
            self._entries[request.id] = entry
            self._waiting[request.tenant] += 1

    def left(self, request_id: str, generated: int | None = None, now: float | None = None) -> None:
        """Remove a request that has ended.

        `generated` is the number of its completion tokens if it completed, else None; `now` is the current time. A
        request that was admitted but misses its deadline lowers the planned share.
        """
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                # Cancelled after its end: the caller left before the last tokens were delivered.
                if now is not None and self._met.pop(request_id, False):
                    self._record_miss()
                return
            if not entry.running:
                self._leave_queue(entry.tenant)
            if entry.max_new and generated is not None:
                self._used_share += (1 - DECAY) * (min(generated / entry.max_new, 1.0) - self._used_share)
            if math.isinf(entry.deadline):
                return
            if generated is not None:
                self._planned_share = min(self._planned_share + MET_INCREMENT, MAX_PLANNED_SHARE)
                self._met[request_id] = True
                while len(self._met) > MAX_REMEMBERED:
                    del self._met[next(iter(self._met))]
            patience = (1 - LATE_CANCELLATION) * (entry.deadline - entry.arrived)
            if generated is None and now is not None and not entry.given_up and now >= entry.arrived + patience:
                self._record_miss()

    def computed(self, tokens: Mapping[str, tuple[int, int]], seconds: float) -> None:
        """Record a step: its (prompt, completion) tokens by request id, and its duration in seconds."""
        with self._lock:
            for request_id, (prompt, new) in tokens.items():
                entry = self._entries.get(request_id)
                if entry is not None:
                    if not entry.running:
                        self._leave_queue(entry.tenant)
                    entry.running = True
                    # Once it decodes, no prompt is left: tokens that were not computed came from the prefix cache.
                    entry.prompt = 0 if new else max(entry.prompt - prompt, 0)
                    entry.new = max(entry.new - new, 0)
            self.cost.measured(sum(map(sum, tokens.values())), seconds)

    def hopeless(self, request_ids: Iterable[str], now: float) -> dict[str, OutOfCapacity]:
        """The errors of those of the requests that have not started and would be late even if they started now.

        Looks only every `LOOK_SECONDS`. Such a request waited in vain, so it counts as a missed deadline. Late is what
        takes more than half of the planned margin: otherwise an engine that becomes a little slower would give up all
        that waits.
        """
        found = {}
        with self._lock:
            if self.cost.steps < MIN_STEPS or now < self._looked + LOOK_SECONDS:
                return {}
            self._looked = now
            sequences = sum(entry.sequences for entry in self._entries.values() if entry.running)
            for request_id in request_ids:
                entry = self._entries.get(request_id)
                if entry is None or entry.running or math.isinf(entry.deadline):
                    continue
                late = now + self._own_seconds(entry, sequences) - (entry.due + entry.deadline) / 2
                if late > 0:
                    self.refused += 1
                    entry.given_up = True
                    self._record_miss()
                    found[request_id] = _too_late(late)
        return found

    def _record_miss(self) -> None:
        self._planned_share = max(self._planned_share * MISS_FACTOR, MIN_PLANNED_SHARE)

    def _leave_queue(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _require_room(self, tenant: str) -> None:
        """Raise `OutOfCapacity` if the queue is full and the tenant fills its equal share, or at twice the limit."""
        total = self._waiting.total()
        if total < self._limit:
            return
        share = self._limit / len({*self._waiting, tenant})
        if total >= 2 * self._limit or self._waiting[tenant] >= share:
            raise OutOfCapacity(f"{total} requests are waiting already", waiting=total)

    def _lateness(self, entry: _Entry, now: float) -> float:
        """The seconds by which a request that arrives now would miss its deadline; 0 if it would not."""
        # An idle engine accepts any request; otherwise one slow step could make it refuse all requests for ever.
        if math.isinf(entry.deadline) or now >= entry.deadline or self.cost.steps < MIN_STEPS or not self._entries:
            return 0.0
        work = self._before(entry)
        waiting = max(0.0, work.sequences - self._max_sequences + entry.sequences)
        wait = self.cost.seconds(work.prompt, work.prompt / self._max_batched)
        if waiting:
            entry.due = entry.deadline - (1 - self._planned_share) * (entry.deadline - now)
            steps = self._used_share * work.new / self._max_sequences
            wait += self.cost.seconds(steps * self._max_sequences, steps) * waiting / max(work.sequences, 1)
        return max(0.0, now + wait + self._own_seconds(entry, work.sequences) - entry.due)

    def _own_seconds(self, entry: _Entry, others: float) -> float:
        """The seconds of the request's own steps, in batches with `others` other sequences."""
        together = min(others + entry.sequences, self._max_sequences)
        steps = self._used_share * entry.new / entry.sequences
        prefill = max(math.ceil(entry.prompt / self._max_batched), 1)
        return self.cost.seconds(entry.prompt, prefill) + self.cost.seconds(steps * together, steps)

    def _before(self, entry: _Entry) -> _Work:
        """The work that is computed before a request.

        This is all that runs, all that waits at a higher priority, the waiting requests of the same tenant with an
        earlier deadline, and of other tenants as much as fair queueing by their weights schedules in the meantime.
        """
        running, mine, others = [], [], []
        for other in self._entries.values():
            if other.running:
                running.append(other)
            elif other.tenant != entry.tenant and other.priority == entry.priority:
                others.append(other)
            elif (-other.priority, other.deadline) <= (-entry.priority, entry.deadline):
                mine.append(other)
        work = _Work()
        work.add(mine)
        own = work.prompt + work.new + entry.prompt + entry.new
        work.add(running)
        if others:
            weights = sum(self._weights.get(tenant, 1.0) for tenant in {other.tenant for other in others})
            passing = own * weights / self._weights.get(entry.tenant, 1.0)
            work.add(others, min(1.0, passing / max(sum(other.prompt + other.new for other in others), 1)))
        return work


def _too_late(seconds: float) -> OutOfCapacity:
    retry = max(seconds, MIN_RETRY_SECONDS)
    message = f"the deadline cannot be met: at the present load the request would end {seconds:.2g} seconds too late"
    return OutOfCapacity(message, retry_seconds=f"{retry:.3f}", late_seconds=f"{seconds:.3f}")
