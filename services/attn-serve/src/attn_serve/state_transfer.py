"""Transfer of prompt states from the replica that computed them (prefill) to the one that decodes.

A gateway never receives a state: it gets a ticket from the prefill replica and passes it to the decode replica, which
fetches the bytes from the prefill replica's endpoint (over TLS if the cluster uses it). They are a safetensors file,
validated as such. States that are not fetched are dropped, and both ends hold a limited number of bytes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import OutOfCapacity, Unavailable, cleaning_up
from attn_engine import PromptState
from attn_gateway import ReplicaTls
from attn_gateway.standstills import answer

from attn_serve import replica_messages as messages
from attn_serve.replica_messages import StateTicket

MAX_HELD_BYTES = 2**30
"""Most bytes of states that a replica holds for others, or has fetched but not used; a single one may be larger."""
HOLD_SECONDS = 60.0
"""How long a state is held until it is fetched."""
PART_BYTES = 2**22
"""Most bytes of a state in one message."""
READ_SECONDS = 5.0
"""Timeout for the next part of a state; a replica that sends nothing for longer is considered lost."""


class StateLost(Unavailable):
    """The state of a prompt that another replica computed is lost; the prompt can be computed again."""

    reason = "STATE_LOST"


class ByteBudget:
    """Limits the total of named byte counts to `limit`; a single larger one may be held alone.

    Used from one event loop.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def held(self) -> int:
        """The number of bytes held now."""
        return self._held.total()

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes can be held now."""
        return not self._held or self.held + size <= self._limit

    async def room(self, size: int = 1) -> None:
        """Wait until `size` more bytes fit; by default, until there is any room."""
        while not self.fits(size):
            self._freed.clear()
            await self._freed.wait()

    async def take(self, name: str, size: int) -> None:
        """Wait until `size` more bytes fit, then hold them under a name."""
        await self.room(size)
        self.hold(name, size)

    def hold(self, name: str, size: int) -> None:
        """Hold `size` bytes under a name, without checking that they fit."""
        self._held[name] += size

    def give_back(self, name: str) -> None:
        """Release the bytes held under a name, if any."""
        if self._held.pop(name, None) is not None:
            self._freed.set()


@dataclass(frozen=True)
class HeldState:
    """A state that waits to be fetched, with its task, the session of the gateway, and the timer that drops it."""

    session: str
    task_id: str
    exported: bytes
    end: asyncio.TimerHandle


class HeldStates:
    """The states that a prefill replica holds until they are fetched, cancelled or expired.

    Used from one event loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.budget = ByteBudget(MAX_HELD_BYTES if limit is None else limit)
        self._held: dict[str, HeldState] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, session: str, task_id: str, exported: bytes) -> str:
        """Hold a state and return the key for fetching it. Raises `OutOfCapacity` if too many bytes are held."""
        size = len(exported)
        if not self.budget.fits(size):
            raise OutOfCapacity(f"{self.budget.held} bytes of states wait to be fetched; {size} more do not fit")
        key = secrets.token_urlsafe(32)
        end = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.pop, key)
        self._held[key] = HeldState(session, task_id, exported, end)
        self.budget.hold(key, size)
        return key

    def pop(self, key: str) -> bytes | None:
        """Remove and return the state of a key; None if there is none."""
        found = self._held.pop(key, None)
        if found is None:
            return None
        found.end.cancel()
        self.budget.give_back(key)
        return found.exported

    def drop(self, task_id: str) -> None:
        """Drop the states of a task."""
        for key in [key for key, held in self._held.items() if held.task_id == task_id]:
            self.pop(key)

    def drop_of(self, session: str) -> None:
        """Drop the states of the tasks of a session."""
        for key in [key for key, held in self._held.items() if held.session == session]:
            self.pop(key)

    def clear(self) -> None:
        """Drop all states."""
        for key in list(self._held):
            self.pop(key)


def parts_of(exported: bytes) -> list[bytes]:
    """Split a state into the messages in which it is sent."""
    return [exported[at : at + PART_BYTES] for at in range(0, len(exported), PART_BYTES)]


async def fetch(ticket: StateTicket, tls: ReplicaTls | None) -> PromptState:
    """Fetch the state of a ticket from the replica that holds it; raises `StateLost` if that is not possible."""
    channel = messages.open_channel(ticket.target, tls)
    try:
        parts = [part async for part in _parts(channel, ticket)]
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise StateLost(f"the state at {ticket.target} cannot be fetched") from error
    finally:
        with cleaning_up("the channel to a replica"):
            await channel.close()
    exported = b"".join(parts)
    if len(exported) != ticket.size:
        raise StateLost(f"received {len(exported)} of the {ticket.size} bytes of a state")
    return replace(ticket.state, exported=exported)


async def _parts(channel: grpc.aio.Channel, ticket: StateTicket) -> AsyncIterator[bytes]:
    fetch_state: Any = channel.unary_stream(messages.STATE)
    call = fetch_state(ticket.key.encode())
    left = ticket.size
    while True:
        part = await answer(call.read(), READ_SECONDS)
        if part is grpc.aio.EOF:
            return
        left -= len(part)
        if left < 0:
            call.cancel()
            raise StateLost(f"received more than the {ticket.size} bytes of a state")
        yield part
