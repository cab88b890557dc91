"""Admission control: which requests may wait, and which cannot be completed before their deadline.

Work that nobody waits for any more costs those who still wait. A request is refused where the tokens that go before it,
at the measured pace of the engine, leave it no time; under overload the engine then computes only what arrives in time.
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
"""Weight of a step in the measured pace, for each later step."""
MIN_STEPS = 5
"""Steps measured before a request is refused for its deadline."""
OUTLIER = 4.0
"""A step counts as at most so many times as long as was expected."""
MIN_RETRY_SECONDS = 0.05
LEAST_PLANNED, MOST_PLANNED = 0.3, 0.9
"""The share of its time that a request which must wait may be planned to take: what is late is worth nothing, and the
way to and from the engine takes time that no step shows."""
MISSED, MET = 0.95, 0.002
"""What a missed deadline multiplies that share with, and what one that was met adds: about 4 % are missed then."""
MOST_MET = 256
"""Requests that ended in time, of which it may still become known that the caller was gone."""
NEARLY = 0.25
"""A caller who leaves with at most this share of the time left has given up waiting; others had other reasons."""


class StepCost:
    """Seconds of a step as `fixed + per_token * tokens`: least squares over the steps measured, recent ones first."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._line = (0.0, 0.0)

    def measured(self, tokens: int, seconds: float) -> None:
        """Note a step that computed so many tokens."""
        if self.steps >= MIN_STEPS:
            # The machine may have done something else meanwhile; what stays slow is believed step by step.
            seconds = min(seconds, OUTLIER * self.seconds(tokens)) or seconds
        self.steps += 1
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(DECAY * old + value for old, value in zip(self._sums, new, strict=True))
        count, total, time, squares, products = self._sums
        spread = count * squares - total * total
        slope = (count * products - total * time) / spread if spread > 1e-9 * count * squares else 0.0
        # A step never costs less for its first token than nothing, nor less with more tokens.
        slope = min(max(slope, 0.0), time / total if total else 0.0)
        self._line = (time - slope * total) / count, slope

    def seconds(self, tokens: float, steps: float = 1.0) -> float:
        """Seconds of `steps` steps that compute `tokens` tokens together."""
        fixed, per_token = self._line
        return fixed * steps + per_token * tokens


@dataclass(eq=False)
class _Entry:
    """A request that was admitted: tokens of its prompt and of its completions that are still to be computed.

    `due` is when it is planned to end, somewhat before its deadline.
    """

    tenant: str
    priority: int
    deadline: float
    prompt: int
    new: int
    sequences: int
    asked: int
    arrived: float
    due: float = math.inf
    running: bool = False


@dataclass
class _Work:
    """Tokens and sequences that go before a request."""

    prompt: float = 0.0
    new: float = 0.0
    sequences: float = 0.0

    def add(self, entries: Iterable[_Entry], share: float = 1.0) -> None:
        """Add these requests, or this share of them."""
        for entry in entries:
            self.prompt += share * entry.prompt
            self.new += share * entry.new
            self.sequences += share * entry.sequences


class AdmissionControl:
    """Requests that wait and run, and the pace at which they are computed. Thread-safe.

    Of the tokens that a request may generate, those are expected that recent requests used of theirs.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._max_sequences, self._max_batched = config.batch_sizes
        self._limit = config.max_queued_requests
        self._weights: Mapping[str, float] = config.tenant_weights
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._waiting: Counter[str] = Counter()
        self._used = 1.0
        self._planned = MOST_PLANNED
        self._met: dict[str, bool] = {}
        self.cost = StepCost()
        self.refused = 0
        """Requests refused for their deadline."""

    def admit(self, request: Request, max_new_tokens: int, now: float) -> None:
        """Let a request wait; `now` is a time of the clock of its deadline, in seconds.

        Raises `AlreadyExists` for an id in use, and `OutOfCapacity` where as many wait as may, or where the deadline
        cannot be met; `retry_seconds` says when it could.
        """
        # What has begun elsewhere is not refused halfway.
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
        """Forget a request that has ended: with `generated` tokens, if by itself; `now`, if it was late or cancelled.

        What is missed although it was planned to be met tells that less can be planned.
        """
        with self._lock:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                # Cancelled after its end: the caller was gone before the last tokens had come to it.
                if now is not None and self._met.pop(request_id, False):
                    self._miss()
                return
            if not entry.running:
                self._waited(entry.tenant)
            if entry.asked and generated is not None:
                self._used += (1 - DECAY) * (min(generated / entry.asked, 1.0) - self._used)
            if math.isinf(entry.deadline):
                return
            if generated is not None:
                self._planned = min(self._planned + MET, MOST_PLANNED)
                self._met[request_id] = True
                while len(self._met) > MOST_MET:
                    del self._met[next(iter(self._met))]
            elif now is not None and now >= entry.deadline - NEARLY * (entry.deadline - entry.arrived):
                self._miss()

    def computed(self, tokens: Mapping[str, tuple[int, int]], seconds: float) -> None:
        """Note a step: the tokens of prompts and completions that it computed, by request, and how long it took."""
        with self._lock:
            for request_id, (prompt, new) in tokens.items():
                entry = self._entries.get(request_id)
                if entry is not None:
                    if not entry.running:
                        self._waited(entry.tenant)
                    entry.running = True
                    # What the prefix cache held is not computed.
                    entry.prompt = 0 if new else max(entry.prompt - prompt, 0)
                    entry.new = max(entry.new - new, 0)
            self.cost.measured(sum(map(sum, tokens.values())), seconds)

    def hopeless(self, request_ids: Iterable[str], now: float) -> dict[str, OutOfCapacity]:
        """Of requests that have computed nothing, those that would end too late even if they began now, with why."""
        found = {}
        with self._lock:
            if self.cost.steps < MIN_STEPS:
                return {}
            sequences = sum(entry.sequences for entry in self._entries.values() if entry.running)
            for request_id in request_ids:
                entry = self._entries.get(request_id)
                if entry is None or entry.running or math.isinf(entry.deadline):
                    continue
                late = now + self._own_seconds(entry, sequences) - entry.due
                if late > 0:
                    self.refused += 1
                    found[request_id] = _too_late(late)
        return found

    def _miss(self) -> None:
        self._planned = max(self._planned * MISSED, LEAST_PLANNED)

    def _waited(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _require_room(self, tenant: str) -> None:
        """A full queue refuses the tenants that fill it; only twice as long a queue refuses all."""
        total = self._waiting.total()
        if total < self._limit:
            return
        share = self._limit / len({*self._waiting, tenant})
        if total >= 2 * self._limit or self._waiting[tenant] >= share:
            raise OutOfCapacity(f"{total} requests are waiting already", waiting=total)

    def _lateness(self, entry: _Entry, now: float) -> float:
        """By how many seconds a request that comes now would miss its deadline; 0 if it would not."""
        # An idle engine takes what comes, or one slow step would be believed for ever.
        if math.isinf(entry.deadline) or now >= entry.deadline or self.cost.steps < MIN_STEPS or not self._entries:
            return 0.0
        work = self._before(entry)
        waiting = max(0.0, work.sequences - self._max_sequences + entry.sequences)
        wait = self.cost.seconds(work.prompt, work.prompt / self._max_batched)
        if waiting:
            entry.due = entry.deadline - (1 - self._planned) * (entry.deadline - now)
            steps = self._used * work.new / self._max_sequences
            wait += self.cost.seconds(steps * self._max_sequences, steps) * waiting / max(work.sequences, 1)
        return max(0.0, now + wait + self._own_seconds(entry, work.sequences) - entry.due)

    def _own_seconds(self, entry: _Entry, others: float) -> float:
        """Seconds of its own steps, beside so many other sequences."""
        together = min(others + entry.sequences, self._max_sequences)
        steps = self._used * entry.new / entry.sequences
        prefill = max(math.ceil(entry.prompt / self._max_batched), 1)
        return self.cost.seconds(entry.prompt, prefill) + self.cost.seconds(steps * together, steps)

    def _before(self, entry: _Entry) -> _Work:
        """What goes before a request: all that runs, what waits of its tenant and is due earlier, and of what waits of
        other tenants at most what their weights let pass meanwhile.
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
