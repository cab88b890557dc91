"""The process of an engine, with an endpoint to which gateways connect directly: a child, or a replica on Ray.

Each listens on a port of its own and requires a secret. A child tells its parent; a replica only callers that have
access to the Ray cluster, which places and replaces replicas: tokens do not pass through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import AttnError, InternalError, Unavailable, cleaning_up
from attn_engine import PromptState, RequestOutput
from attn_engine.client import EngineLost, TextTask
from attn_engine.host.engine import OpenRanks
from attn_engine.host.rank_processes import RankProcesses
from attn_engine.host.ranks import RankGroup
from attn_engine.in_process import InProcess
from attn_gateway import ReplicaTls
from attn_gateway.standstills import freeze_gc_heap
from attn_schema import EngineConfig
from attn_schema.child_process import Parent

from attn_serve import replica_messages as messages
from attn_serve.replica_messages import EngineTask, Loaded, ReplicaAddress, SentError, SentOutputs, StateTicket
from attn_serve.state_transfer import MAX_HELD_BYTES, ByteBudget, HeldStates, fetch, parts_of

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
"""The interval at which a child checks that its engine runs."""


class Session:
    """The connection of one gateway: the tasks that it submitted, and the outputs to send to it."""

    def __init__(self) -> None:
        self.tasks: set[str] = set()
        self._ready: list[RequestOutput] = []
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output to the next message."""
        if output.last:
            self.tasks.discard(output.request_id)
        self._ready.append(output)
        self._wake.set()

    def wake(self) -> None:
        """Send a message now, even without outputs."""
        self._wake.set()

    async def next(self) -> list[RequestOutput]:
        """Wait for outputs and return all that are ready; none after a heartbeat interval or a `wake` without any."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), messages.HEARTBEAT_SECONDS)
        self._wake.clear()
        ready, self._ready = self._ready, []
        return ready


class EngineServer:
    """The gRPC endpoint of an engine. Used from one event loop.

    States of prompts are exchanged only with replicas whose `model`, a `fingerprint`, is equal.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        open_ranks: OpenRanks | None = None,
        tls: ReplicaTls | None = None,
        model: str = "",
    ) -> None:
        self.engine = InProcess(folder, config, open_ranks, self._deliver)
        self._tls = tls
        self._model = model
        self.states = HeldStates()
        """The states that other replicas can fetch."""
        self.fetched = ByteBudget(MAX_HELD_BYTES)
        """The bytes, by task, of states that were fetched for tasks without an output yet."""
        self._prefills: dict[str, asyncio.Future[RequestOutput]] = {}
        self._fetching: dict[str, asyncio.Task[PromptState]] = {}
        self._secret = secrets.token_urlsafe(32)
        self._sessions: dict[str, Session] = {}
        self._server: grpc.aio.Server | None = None
        self._draining = False
        self.address: ReplicaAddress | None = None

    async def start(self, ip: str) -> ReplicaAddress:
        """Load the model, then listen on any free port of the interface `ip`."""
        info = await self.engine.start()
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Call": grpc.unary_unary_rpc_method_handler(self._call),
            "Outputs": grpc.unary_stream_rpc_method_handler(self._outputs),
            "State": grpc.unary_stream_rpc_method_handler(self._state),
        }
        self._server = grpc.aio.server(options=[*messages.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, handlers),))
        host = f"[{ip}]" if ":" in ip else ip
        if self._tls is None:
            port = self._server.add_insecure_port(f"{host}:0")
        else:
            port = self._server.add_secure_port(f"{host}:0", messages.server_credentials(self._tls))
        await self._server.start()
        self.address = ReplicaAddress(
            id=secrets.token_hex(8),
            target=f"{host}:{port}",
            secret=self._secret,
            pid=os.getpid(),
            info=info,
        )
        return self.address

    def address_now(self) -> ReplicaAddress | None:
        """The address, with whether the model is another than that of its folder by now."""
        return None if self.address is None else replace(self.address, changed=self.engine.changed)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new tasks, give gateways up to `timeout_s` seconds to move the running ones, then stop."""
        self._draining = True
        for session in self._sessions.values():
            session.wake()
        end = asyncio.get_running_loop().time() + timeout_s
        while self.states or any(session.tasks for session in self._sessions.values()):
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self.states.clear()
        if self._server is not None:
            await self._server.stop(grace=0.1)
        await self.engine.stop(0.0)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.fetched.give_back(output.request_id)  # the state is in the KV cache by now, or the task has ended
            prefill = self._prefills.get(output.request_id)
            if prefill is not None and not prefill.done():
                prefill.set_result(output)
                continue
            for session in self._sessions.values():
                if output.request_id in session.tasks:
                    session.put(output)
                    break

    async def _call(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        session = await self._session_of(context)
        try:
            method, arguments = messages.decode_call(data)
            return messages.encode_answer(await self._answer(session, method, arguments))
        except AttnError as error:
            return messages.encode_answer(error)

    async def _answer(self, session_id: str, method: str, arguments: tuple[Any, ...]) -> Any:
        match method, arguments:
            case "submit", (task,):
                await self._begin(self._session_for_tasks(session_id), task)
            case "submit_moved", (task, ticket):
                await self._submit_moved(self._session_for_tasks(session_id), task, ticket)
            case "prefill", (task,):
                return await self._prefill(session_id, task)
            case "cancel", (task_id,):
                await self._cancel(task_id)
            case _:
                return await getattr(self.engine, method)(*arguments)
        return None

    def _session_for_tasks(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or self._draining:
            raise EngineLost("the replica accepts no more tasks")
        return session

    async def _begin(self, session: Session, task: TextTask, state: PromptState | None = None) -> None:
        """Submit a task to the engine; it belongs to the session until its last output."""
        with self._task_of(session, task.id):
            await self.engine.submit(task, state)

    @contextlib.contextmanager
    def _task_of(self, session: Session, task_id: str) -> Iterator[None]:
        """Add a task to the session, and remove it again if the `with` block fails."""
        session.tasks.add(task_id)
        try:
            with _answered():
                yield
        except BaseException:
            session.tasks.discard(task_id)
            self.fetched.give_back(task_id)
            raise

    async def _submit_moved(self, session: Session, task: TextTask, ticket: StateTicket) -> None:
        """Submit a task whose prompt another replica has computed; raises `StateLost` if the state is gone."""
        state = None
        if ticket.model == self._model:
            fetching = self._fetching[task.id] = asyncio.ensure_future(self._fetch(task.id, ticket))
            try:
                with self._task_of(session, task.id):
                    state = await fetching
            finally:
                fetching.cancel()
                del self._fetching[task.id]
        else:
            log.warning(
                "task %s: the state was computed with other weights or settings; the prompt is computed here", task.id
            )
        await self._begin(session, task, state)

    async def _fetch(self, task_id: str, ticket: StateTicket) -> PromptState:
        await self.fetched.take(task_id, ticket.size)
        return await fetch(ticket, self._tls)

    async def _prefill(self, session_id: str, task: TextTask) -> StateTicket:
        """Compute a prompt and hold its state until a replica fetches it with the ticket."""
        await self.states.budget.room()
        session = self._session_for_tasks(session_id)
        done: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self._prefills[task.id] = done
        try:
            with self._task_of(session, task.id):
                await self.engine.prefill(task)
            output = await done
        except BaseException:
            with cleaning_up("a prompt that nobody waits for"):
                await self.engine.cancel(task.id)
            raise
        finally:
            session.tasks.discard(task.id)
            del self._prefills[task.id]
        if output.error is not None:
            raise output.error
        if output.state is None or self.address is None:
            raise InternalError("the engine computed a prompt but returned no state")
        if self._sessions.get(session_id) is not session:
            raise Unavailable("the gateway that sent the task has disconnected")
        exported = output.state.exported
        return StateTicket(
            target=self.address.target,
            key=self.states.put(session_id, task.id, exported),
            size=len(exported),
            model=self._model,
            state=output.state.without_bytes(),
        )

    async def _cancel(self, task_id: str) -> None:
        """Cancel a task at any stage: while its state is held or fetched, in prefill, or in decoding."""
        self.states.drop(task_id)
        if task_id in self._fetching:
            self._fetching[task_id].cancel()
        await self.engine.cancel(task_id)

    async def _state(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        """Stream the bytes of a state; the key is the only secret needed, and it is valid once."""
        exported = self.states.pop(data.decode(errors="replace"))
        if exported is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no state is held under this key")
        for part in parts_of(exported or b""):
            yield part

    async def _outputs(
        self,
        data: bytes,  # noqa: ARG002
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> AsyncIterator[bytes]:
        name = await self._session_of(context)
        if name in self._sessions:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a session of this name is open")
        session = self._sessions[name] = Session()
        try:
            session.wake()  # the first message tells the gateway that the session is open
            while True:
                outputs = await session.next()
                sent = SentOutputs.of(outputs, await self.engine.stats(), len(self._sessions), draining=self._draining)
                yield messages.encode_outputs(sent)
        finally:
            # The gateway has disconnected: its tasks are cancelled and its states dropped.
            del self._sessions[name]
            self.states.drop_of(name)
            for task_id in list(session.tasks):
                with cleaning_up("a task of a gateway that is gone"):
                    await self._cancel(task_id)

    async def _session_of(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> str:
        """The name of the session that a call belongs to; aborts calls without the secret."""
        given = {key: str(value) for key, value in context.invocation_metadata() or ()}
        if not hmac.compare_digest(given.get(messages.SECRET, "").encode(), self._secret.encode()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "this endpoint is only for the gateways of its cluster"
            )
        return given.get(messages.SESSION, "")


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Turn a cancellation by another call into `EngineLost`; otherwise gRPC would leave this call without an answer."""
    try:
        yield
    except asyncio.CancelledError:
        handler = asyncio.current_task()
        if handler and handler.cancelling():
            raise
        raise EngineLost("the task was cancelled before it began") from None


def main() -> None:
    """The entry point of a child process: serve the model of its `EngineTask`."""
    parent = Parent()
    task = parent.task(EngineTask)
    os.environ.update(task.environment)  # torch reads them when a GPU is first used
    parent.follow(EngineTask, lambda _: None)  # there is one; this process ends with its parent
    asyncio.run(_serve(parent, task))


async def _serve(parent: Parent, task: EngineTask) -> None:
    server = EngineServer(Path(task.folder), task.config, _ranks)
    try:
        address = await server.start("127.0.0.1")
    except AttnError as error:
        parent.send(Loaded(error=SentError.of(error)))
        return
    freeze_gc_heap()
    parent.send(Loaded(address=address))
    while server.engine.alive:  # noqa: ASYNC110 -- threads end without telling the loop
        await asyncio.sleep(WATCH_SECONDS)
    log.error("the engine has ended")
    os._exit(1)


def _ranks(folder: Path, config: EngineConfig) -> RankGroup:
    """The other ranks as children of this one; if one is lost, this process exits and all are started again."""
    return RankGroup(folder, config, RankProcesses(), exit_without_rank)


def exit_without_rank(error: Exception) -> None:
    """Exit at once, as a rank of this process's model is lost; requests continue on the engine that replaces it."""
    message = error.message if isinstance(error, Unavailable) else repr(error)
    log.error("the engine exits, as a rank of its model has ended: %s", message)
    os._exit(1)
