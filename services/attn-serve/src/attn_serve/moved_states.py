"""States of prompts on their way from the replica that computed them to the one that decodes.

A gateway never sees a state: it gets a ticket from the prefill replica and gives it to the decode replica, which
fetches the bytes from the other's endpoint (over TLS where the cluster has it). They are a safetensors file, checked as
such. What nobody fetches is dropped, and both ends hold at most so many bytes.
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
from attn_core.errors import OutOfCapacity, Unavailable
from attn_engine import PromptState
from attn_gateway import ReplicaTls

from attn_serve import replica_messages as messages
from attn_serve.replica_messages import StateTicket

MAX_HELD_BYTES = 2**30
"""Bytes of states that a replica holds for others, or has fetched and not yet begun; one state alone may be larger."""
HOLD_SECONDS = 60.0
"""How long a state waits to be fetched."""
PART_BYTES = 2**22
"""Bytes of a state in one message."""
READ_SECONDS = 5.0
"""How long the next part may take; a replica that is silent for longer is lost."""


class StateLost(Unavailable):
    """The state of a prompt that was computed elsewhere is gone; the prompt can be computed again."""

    reason = "STATE_LOST"


class ByteBudget:
    """At most `limit` bytes by name, or one that is larger, alone. Used from one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held.total()

    def fits(self, size: int) -> bool:
        """Whether so many bytes more can be held now."""
        return not self._held or self.held + size <= self._limit

    async def room(self, size: int = 1) -> None:
        """Wait until so many bytes fit; anything, if it is not given."""
        while not self.fits(size):
            self._freed.clear()
            await self._freed.wait()

    async def take(self, name: str, size: int) -> None:
        """Wait until so many bytes fit, then hold them under a name."""
        await self.room(size)
        self.hold(name, size)

    def hold(self, name: str, size: int) -> None:
        """Hold bytes that fit under a name."""
        self._held[name] += size

    def give_back(self, name: str) -> None:
        """Hold nothing under this name; a name that holds nothing is left alone."""
        if self._held.pop(name, None) is not None:
            self._freed.set()


@dataclass(frozen=True)
class HeldState:
    """A state that waits to be fetched: of which task of which gateway's session, and the end of its time."""

    session: str
    task_id: str
    exported: bytes
    end: asyncio.TimerHandle


class HeldStates:
    """The states that a prefill replica holds until they are fetched, cancelled or too old.

    Used from one event loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.budget = ByteBudget(MAX_HELD_BYTES if limit is None else limit)
        self._held: dict[str, HeldState] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, session: str, task_id: str, exported: bytes) -> str:
        """Hold a state; returns the key that fetches it. Raises `OutOfCapacity` where too many bytes are held."""
        size = len(exported)
        if not self.budget.fits(size):
            raise OutOfCapacity(f"{self.budget.held} bytes of states wait to be fetched; {size} more do not fit")
        key = secrets.token_urlsafe(32)
        end = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.pop, key)
        self._held[key] = HeldState(session, task_id, exported, end)
        self.budget.hold(key, size)
        return key

    def pop(self, key: str) -> bytes | None:
        """The state of this key, which is held no longer; None where there is none."""
        found = self._held.pop(key, None)
        if found is None:
            return None
        found.end.cancel()
        self.budget.give_back(key)
        return found.exported

    def drop(self, task_id: str) -> None:
        """Hold no state of this task."""
        for key in [key for key, held in self._held.items() if held.task_id == task_id]:
            self.pop(key)

    def drop_of(self, session: str) -> None:
        """Hold no state that this session asked for."""
        for key in [key for key, held in self._held.items() if held.session == session]:
            self.pop(key)

    def clear(self) -> None:
        """Hold nothing."""
        for key in list(self._held):
            self.pop(key)


def parts_of(exported: bytes) -> list[bytes]:
    """The messages in which a state is sent."""
    return [exported[at : at + PART_BYTES] for at in range(0, len(exported), PART_BYTES)]


async def fetch(ticket: StateTicket, tls: ReplicaTls | None) -> PromptState:
    """The state that a ticket is for, from the replica that holds it; raises `StateLost` where it is not there."""
    channel = messages.open_channel(ticket.target, tls)
    try:
        parts = [part async for part in _parts(channel, ticket)]
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise StateLost(f"the state at {ticket.target} cannot be fetched") from error
    finally:
        await channel.close()
    exported = b"".join(parts)
    if len(exported) != ticket.size:
        raise StateLost(f"{len(exported)} bytes came of a state of {ticket.size}")
    return replace(ticket.state, exported=exported)


async def _parts(channel: grpc.aio.Channel, ticket: StateTicket) -> AsyncIterator[bytes]:
    ask: Any = channel.unary_stream(messages.STATE)
    call = ask(ticket.key.encode())
    left = ticket.size
    while True:
        part = await asyncio.wait_for(call.read(), READ_SECONDS)
        if part is grpc.aio.EOF:
            return
        left -= len(part)
        if left < 0:
            call.cancel()
            raise StateLost(f"more than {ticket.size} bytes came of a state")
        yield part
