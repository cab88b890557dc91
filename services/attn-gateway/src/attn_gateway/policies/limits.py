"""When calls may run: once their service is ready, and within the limits of the server, of connections and of tenants.

Refusals name the limit and the time after which to retry.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from attn_core.errors import OutOfCapacity, Unavailable, UserError
from attn_schema.methods import Row

from attn_gateway.call import LOCAL, Call, Charge, Rate
from attn_gateway.tenants import Tenant, Tenants

WAITING_PER_STREAM = 4
"""Most waiting calls of a connection, per call that may run at the same time."""
WAITING_SHARE = 0.25
"""The part of the time until its deadline that a call may wait for others of its connection."""
FEWEST_ENDS, ENDS = 8, 64
"""The number of ended calls from which the rate of a connection is estimated: at least, and the latest so many."""
BURST_SECONDS = 10.0
"""A tenant that was idle may use this many seconds of its rate at once."""
MINUTE = 60.0


class Bucket:
    """A token bucket for rate limiting: fills by `per_minute`, up to `BURST_SECONDS` of it or `least`, if larger.

    The level may become negative; `wait` then returns the time until it has recovered.
    """

    def __init__(self, per_minute: float, least: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / MINUTE
        self._most = max(self._per_second * BURST_SECONDS, least)
        self._level = self._most
        self._clock = clock
        self._at = clock()

    def wait(self, least: float) -> float:
        """Seconds until the level is at least `least`; 0 if it is."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._per_second, self._most)
        self._at = now
        return max(0.0, (least - self._level) / self._per_second)

    def take(self, amount: float) -> None:
        """Reduce the level, even below zero."""
        self._level -= amount

    def rate(self) -> Rate:
        """What is left now."""
        seconds = self.wait(self._most)
        return Rate(self._per_second * MINUTE, max(0, int(self._level)), seconds)


class TenantUse:
    """The current use of a tenant's limits."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.running = 0
        self._requests = tenant.requests_per_minute and Bucket(tenant.requests_per_minute, 1.0, clock)
        self._tokens = tenant.tokens_per_minute and Bucket(tenant.tokens_per_minute, 1.0, clock)

    def begin(self, *, counted: bool = False) -> None:
        """Count a call that starts; raises `OutOfCapacity` naming the limit that is reached.

        One that is `counted` belongs to a request that was admitted: only its running is counted.
        """
        tenant = self.tenant
        if tenant.max_running is not None and self.running >= tenant.max_running:
            raise _reached("max_running", tenant.max_running, 1.0)
        if self._tokens and not counted and (wait := self._tokens.wait(1.0)) > 0:
            raise _reached("tokens_per_minute", tenant.tokens_per_minute, wait)
        if self._requests and not counted:
            if (wait := self._requests.wait(1.0)) > 0:
                raise _reached("requests_per_minute", tenant.requests_per_minute, wait)
            self._requests.take(1.0)
        self.running += 1

    def end(self) -> None:
        """Count a call that has ended."""
        self.running -= 1

    def rates(self) -> dict[str, Rate]:
        """What is left now of each limit a minute that the tenant has."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: bucket.rate() for name, bucket in buckets.items() if bucket}

    def spend(self, tokens: int) -> None:
        """Count tokens, or with a negative number give them back; a running call continues, and later ones are refused
        until the rate has caught up."""
        if self._tokens:
            self._tokens.wait(0.0)
            self._tokens.take(tokens)


class Connections:
    """Limits the calls of each connection: `most` run at a time, and `WAITING_PER_STREAM` times as many may wait.

    A call with a deadline does not wait if, at the rate at which calls of its connection have ended, that would take
    more than `WAITING_SHARE` of its time: the engine that would refuse it then does not know of it before.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._ends: dict[str, deque[float]] = {}
        """When the last calls of each connection that reached the limit ended."""

    @asynccontextmanager
    async def turn(self, peer: str, remaining: float | None = None) -> AsyncIterator[None]:
        """Run one call of a connection, with `remaining` seconds until its deadline, inside the block.

        Calls from this process are not limited.
        """
        if peer == LOCAL:
            yield
            return
        await self.enter(peer, remaining)
        try:
            yield
        finally:
            self.leave(peer)

    async def enter(self, peer: str, remaining: float | None = None) -> None:
        """Wait until a call may start; raises `OutOfCapacity` if too many calls wait, or this one would too long."""
        if self._running[peer] < self._most:
            self._running[peer] += 1
            return
        queue = self._waiting.setdefault(peer, [])
        if len(queue) >= WAITING_PER_STREAM * self._most:
            running = f"{self._most} calls of this connection are running and {len(queue)} are waiting"
            text = f"{running}; open another connection, or send fewer calls at once"
            raise OutOfCapacity(text, limit=self._most, retry_seconds=1.0)
        wait = self._seconds_until_turn(peer, len(queue))
        if remaining is not None and wait > WAITING_SHARE * remaining:
            running = f"{self._most} calls of this connection are running"
            text = f"{running}; the call would wait for about {wait:.2g} seconds"
            raise OutOfCapacity(text, limit=self._most, retry_seconds=f"{wait - WAITING_SHARE * remaining:.3f}")
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(peer)
            elif turn in queue:
                queue.remove(turn)
            raise

    def leave(self, peer: str) -> None:
        """End a call; the next waiting call starts."""
        queue = self._waiting.get(peer, [])
        if peer in self._waiting:
            self._ends.setdefault(peer, deque(maxlen=ENDS)).append(self._clock())
        while queue:
            turn = queue.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting.pop(peer, None)
        self._ends.pop(peer, None)
        self._running[peer] -= 1
        if not self._running[peer]:
            del self._running[peer]

    def _seconds_until_turn(self, peer: str, waiting: int) -> float:
        """The expected seconds until a call starts behind `waiting` others; 0 before enough calls have ended."""
        ends = self._ends.get(peer)
        if ends is None or len(ends) < FEWEST_ENDS:
            return 0.0
        return (waiting + 1) * (self._clock() - ends[0]) / len(ends)


class Limits:
    """Enforces the limits of the server, of connections and of tenants, and counts the tokens that a call used."""

    def __init__(self, tenants: Tenants, max_calls: int, max_streams: int) -> None:
        self._tenants = tenants
        self._max_calls = max_calls
        self._inside = 0
        self._connections = Connections(max_streams)
        self._uses: dict[str, TenantUse] = {}

    def use_of(self, tenant: str) -> TenantUse | None:
        """The use of a tenant's current limits; None for an unknown tenant, which has none."""
        known = self._tenants.named(tenant)
        if known is None:
            return None
        use = self._uses.get(tenant)
        if use is None or use.tenant != known:
            running = use.running if use else 0
            use = self._uses[tenant] = TenantUse(known)
            use.running = running
        return use

    @asynccontextmanager
    async def __call__(self, _: Row, call: Call) -> AsyncIterator[None]:
        """Run a call within the limits; one that is refused before anything is computed counts no tokens."""
        async with self._connections.turn(call.peer, call.remaining()):
            if self._inside >= self._max_calls:
                text = f"this server already runs {self._max_calls} calls, its maximum"
                raise OutOfCapacity(text, limit=self._max_calls, retry_seconds=1.0)
            use = self.use_of(call.tenant)
            call.charge = Charge(use.spend if use else None)
            if use:
                call.rates = use.rates
                use.begin(counted=call.counted)
            self._inside += 1
            try:
                yield
            except (UserError, OutOfCapacity):
                call.charge.waive()
                raise
            finally:
                self._inside -= 1
                call.charge.settle()
                if use:
                    self._uses[use.tenant.name].end()


class Readiness:
    """Refuses calls to services that are not ready with UNAVAILABLE, and counts the running calls."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._closing = False
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, service: str) -> None:
        """Admit calls to the service with this full name."""
        self._open.add(service)

    def close(self) -> None:
        """Refuse all new calls."""
        self._closing = True

    async def idle(self) -> None:
        """Wait until no call runs."""
        await self._idle.wait()

    @asynccontextmanager
    async def __call__(self, row: Row, _: Call) -> AsyncIterator[None]:
        """Run a call if its service is ready."""
        if self._closing:
            raise Unavailable("the server is shutting down")
        if row.service not in self._open:
            raise Unavailable(f"{row.service} is still starting")
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()


def _reached(limit: str, value: float | None, wait: float) -> OutOfCapacity:
    text = f"the limit {limit}={value:g} of this tenant is reached"
    return OutOfCapacity(text, limit=limit, allowed=f"{value:g}", retry_seconds=f"{wait:.3f}")
