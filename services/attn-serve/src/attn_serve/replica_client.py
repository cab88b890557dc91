"""A gateway's connection to one replica: calls, and one stream of the outputs of all its tasks there."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
from attn_engine.client import EmbedTask, EngineLost, Streams, TextTask
from attn_gateway import ReplicaTls
from attn_gateway.standstills import answer
from attn_schema import Embeddings, EngineStats

from attn_serve import replica_messages as messages
from attn_serve.replica_messages import ReplicaAddress, StateTicket

SILENCE_SECONDS = 5.0
"""A replica that sends nothing for so long, not even a heartbeat, is considered lost: its machine or network failed."""
OPEN_SECONDS = 10.0
"""How long a replica may take to open a session."""

DRAIN_POLL_SECONDS = 0.02
LARGE_BYTES = 32 * 1024
"""Larger answers are decoded in a thread, so that they do not block the event loop."""


class ReplicaClient:
    """A gateway's client of one replica. `lost` is called when the replica drains and when the connection breaks."""

    def __init__(
        self,
        address: ReplicaAddress,
        streams: Streams,
        lost: Callable[[ReplicaClient], None],
        tls: ReplicaTls | None = None,
    ) -> None:
        self.address = address
        self.stats = EngineStats()
        self.draining = False
        self.gateways = 1
        """The number of gateways that are connected to the replica."""
        self.tasks: set[str] = set()
        self._streams = streams
        self._lost = lost
        self.gone = False
        """Whether the connection has broken or was closed."""
        self._channel = messages.open_channel(address.target, tls)
        self._metadata = ((messages.SECRET, address.secret), (messages.SESSION, secrets.token_hex(8)))
        self._call_method: Any = self._channel.unary_unary(messages.CALL)
        self._listener: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The replica's id."""
        return self.address.id

    @property
    def load(self) -> float:
        """The replica's number of requests, of all gateways, plus the fraction of its KV cache in use."""
        used = self.stats.kv_tokens_used / max(self.stats.kv_tokens_total, 1)
        return max(len(self.tasks), self.stats.running + self.stats.waiting) + used

    async def connect(self) -> None:
        """Open the session; raises `EngineLost` if the replica does not answer or refuses the secret."""
        outputs: Any = self._channel.unary_stream(messages.OUTPUTS)
        call = outputs(b"", metadata=self._metadata)
        try:
            first = await answer(call.read(), OPEN_SECONDS)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            await self._channel.close()
            raise EngineLost(f"replica {self.id} does not answer at {self.address.target}") from error
        self._handle_outputs(first)
        self._listener = asyncio.create_task(self._listen(call), name=f"outputs of replica {self.id}")

    async def submit(self, task: TextTask, ticket: StateTicket | None = None) -> None:
        """Submit a task, with a ticket for its prompt's state if there is one; `Streams` delivers its outputs."""
        self.tasks.add(task.id)
        try:
            if ticket is None:
                await self.call("submit", task)
            else:
                await self.call("submit_moved", task, ticket)
        except BaseException:
            self.tasks.discard(task.id)
            raise

    async def embed(self, task: EmbedTask) -> Embeddings:
        """A vector of norm 1 for each text."""
        self.tasks.add(task.id)
        try:
            found: Embeddings = await self.call("embed", task)
        finally:
            self.tasks.discard(task.id)
        return found

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host; raises its error, or `EngineLost` if the connection broke."""
        try:
            data = await self._call_method(messages.encode_call(method, *arguments), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise EngineLost(f"the connection to replica {self.id} broke: {error.code().name}") from error
        except asyncio.CancelledError:
            # gRPC cancels the calls of a channel that is closed; only a cancellation by the caller is passed on.
            task = asyncio.current_task()
            if not self.gone or (task is not None and task.cancelling()):
                raise
            raise EngineLost(f"the connection to replica {self.id} was closed") from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise EngineLost(f"the connection to replica {self.id} is closed") from error
        if len(data) <= LARGE_BYTES:
            return messages.decode_answer(method, cast("bytes", data))
        return await asyncio.to_thread(messages.decode_answer, method, data)

    async def cancel(self, task_id: str) -> None:
        """Cancel a task; does nothing if the replica is gone, as its tasks ended with it."""
        self.tasks.discard(task_id)
        with contextlib.suppress(EngineLost):
            await self.call("cancel", task_id)

    async def drained(self, seconds: float) -> None:
        """Wait up to so many seconds until no task runs."""
        end = asyncio.get_running_loop().time() + seconds
        while self.tasks and not self.gone:
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def close(self) -> None:
        """Close the connection; the replica cancels the tasks that still run for this gateway."""
        self.gone = True
        if self._listener is not None:
            self._listener.cancel()
        await self._channel.close()

    async def _listen(self, call: Any) -> None:
        try:
            while True:
                data = await answer(call.read(), SILENCE_SECONDS)
                if data is grpc.aio.EOF:
                    break
                self._handle_outputs(data)
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        finally:
            call.cancel()
            self._report()

    def _handle_outputs(self, data: Any) -> None:
        if data is grpc.aio.EOF:
            raise EngineLost(f"replica {self.id} closed the session")
        sent = messages.decode_outputs(cast("bytes", data))
        self.stats, self.gateways = sent.stats, sent.gateways
        outputs = sent.received()
        for output in outputs:
            if output.last:
                self.tasks.discard(output.request_id)
        self._streams.deliver(outputs)
        if sent.draining and not self.draining:
            self.draining = True
            self._lost(self)

    def _report(self) -> None:
        if not self.gone:
            self.gone = True
            self._lost(self)
