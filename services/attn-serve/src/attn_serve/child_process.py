"""An engine in a child process of this machine, which is started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from attn_core.errors import AttnError, Unavailable, UserError, cleaning_up
from attn_engine.client import EmbedTask, EngineClient, EngineLost, TextTask
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineConfig,
    EngineStats,
    ModelInfo,
    Prompt,
    Tokenization,
)
from attn_schema.child_process import Child

from attn_serve.adapter_folders import AdapterFolders
from attn_serve.placement import EngineProcesses, GpuShares, engine_environment, with_threads
from attn_serve.replica_client import ReplicaClient
from attn_serve.replica_messages import EngineTask, Loaded

log = logging.getLogger(__name__)

MAX_DEATHS, DEATHS_SECONDS = 3, 60.0
"""An engine that dies so often within so many seconds is not started again."""
DEAD_SECONDS = 0.5
"""How long a child whose connection broke may take to end by itself; one that hangs is killed then."""
EXIT_SECONDS = 5.0
"""How long a child that is stopped may take to end."""


class ChildProcess(EngineClient):
    """Serves one model from a child process, to which it connects over the loopback interface.

    A child that dies, or is silent for some seconds, is started again with the same adapters, and its tasks continue
    there; if it dies too often, the model has failed.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: EngineConfig,
        gpus: GpuShares | None = None,
        processes: EngineProcesses | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._folder = folder
        self._config = with_threads(config)
        self._gpus = gpus or GpuShares()
        self._processes = processes or EngineProcesses()
        self._adapters = AdapterFolders()
        self._child: Child | None = None
        self._client: ReplicaClient | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._deaths: list[float] = []
        self._updated = False
        self._end: AttnError | None = Unavailable(f"model {name!r} is not running")
        self._reserved = ExitStack()

    @property
    def replicas(self) -> int:
        """1 while the child accepts tasks."""
        return int(self._client is not None)

    async def pids(self) -> list[int]:
        """The id of the process that holds the model."""
        return [] if self._child is None or self._client is None else [self._child.pid]

    async def start(self) -> ModelInfo:
        """Start the child; returns when it has loaded the model, and raises the errors of loading."""
        gpu = self._reserved.enter_context(self._gpus.taken(self._config))
        task = EngineTask(str(self._folder), self._config, gpu)
        self._end = None
        try:
            return await self._launch(task)
        except BaseException:
            with cleaning_up("the child that did not start"):
                await asyncio.shield(self.stop(0))
            raise

    async def submit(self, task: TextTask) -> None:
        """Start a task, whose outputs go to `streams`."""
        client = self._running()
        self._adapters.require_unchanged(task.adapter)
        await client.submit(task)

    async def cancel(self, task_id: str) -> None:
        """Stop a task; unknown ids are ignored."""
        if self._client is not None:
            await self._client.cancel(task_id)

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens that `generate` would process for a prompt."""
        found: Tokenization = await self._running().call("tokenize", prompt)
        return found

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, also on a child that is started later."""
        await self._running().call("load_adapter", name, folder)
        await self._adapters.add(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running tasks go on."""
        self._adapters.remove(name)
        await self._running().call("unload_adapter", name)

    async def sleep(self, shutdown_timeout: float) -> None:
        """Free the memory of weights and KV cache in the child."""
        await self._running().call("sleep", shutdown_timeout)

    async def wake_up(self) -> None:
        """Load the model again in the child."""
        await self._running().call("wake_up")

    async def update_weights(self, data: bytes, offset: int, shutdown_timeout: float, *, last: bool) -> None:
        """See `EngineClient.update_weights`; a child that dies later is not started again, as the weights die too."""
        call = self._running().call
        await call("stage_weights", data, offset)
        if last:
            await call("open_staged")
            await call("use_staged", shutdown_timeout)
            self._updated = True

    async def stats(self) -> EngineStats:
        """The current engine statistics."""
        found: EngineStats = await self._running().call("stats")
        return found

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then end the child."""
        self._end = stopped = Unavailable(f"model {self._name!r} is being unloaded")
        if self._client is not None:
            await self._client.drained(shutdown_timeout)
        if self._restarting is not None:
            self._restarting.cancel()
        self.streams.fail(stopped)
        await self._end_child(EXIT_SECONDS)
        self._reserved.close()

    async def _embed(self, task: EmbedTask) -> Embeddings:
        return await self._running().embed(task)

    async def _attention_maps(self, request: AttentionMapsRequest, adapter: str) -> list[AttentionMap]:
        found: list[AttentionMap] = await self._running().call("attention_maps", request, adapter)
        return found

    def _running(self) -> ReplicaClient:
        if self._end is not None:
            raise self._end
        if self._client is None:
            raise EngineLost(f"the engine of model {self._name!r} is being started again")
        return self._client

    async def _launch(self, task: EngineTask) -> ModelInfo:
        """Start a child and connect to it; raises the error of loading, `Unavailable` if it died of that."""
        child = self._child = await asyncio.to_thread(self._processes.start, engine_environment(task.config))
        loaded = await asyncio.wrap_future(_loaded(child, task))
        if loaded.address is None:
            words = await self._end_child(EXIT_SECONDS)
            raise (
                loaded.error.received() if loaded.error else Unavailable(f"the engine of {self._name!r} died: {words}")
            )
        client = ReplicaClient(loaded.address, self.streams, lambda client: self._lost(client, task))
        await client.connect()
        try:
            await self._adapters.load_into(partial(client.call, "load_adapter"))
        except AttnError:
            with cleaning_up("the connection to a child"):
                await client.close()
            raise
        self._client = client
        return loaded.address.info

    def _lost(self, client: ReplicaClient, task: EngineTask) -> None:
        if client is not self._client or self._end is not None:
            return
        self._client = None
        self.streams.fail(EngineLost(f"the engine of model {self._name!r} died; it is being started again"))
        self._restarting = asyncio.create_task(self._restart(client, task), name=f"restart of {self._name}")

    async def _restart(self, lost: ReplicaClient, task: EngineTask) -> None:
        """Start the child until it runs; what keeps it from loading counts as its death."""
        now = asyncio.get_running_loop().time()
        await lost.close()
        words = await self._end_child(DEAD_SECONDS)
        if self._updated:
            self._fail(Unavailable(f"the engine of {self._name!r} died with its updated weights; load the model again"))
            return
        while True:
            self._deaths = [*(at for at in self._deaths if now - at < DEATHS_SECONDS), now]
            if len(self._deaths) >= MAX_DEATHS:
                break
            log.warning("the engine of model %s died: it %s; it is started again", self._name, words)
            try:
                await self._launch(task)
            except UserError as error:  # such as files of the model that have changed
                await self._end_child(0)
                self._fail(error)
                return
            except AttnError as error:
                await self._end_child(0)
                words = error.message
            else:
                return
        deaths = f"the engine of {self._name!r} died {MAX_DEATHS} times within {DEATHS_SECONDS:g} seconds"
        self._fail(Unavailable(f"{deaths}; the last one {words}", model=self._name))

    def _fail(self, error: AttnError) -> None:
        log.error("model %s is not started again: %s", self._name, error.message)
        self._end = error
        self.streams.fail(error)
        self._reserved.close()
        self.on_failure(error.message)

    async def _end_child(self, seconds: float) -> str:
        """End the child and wait until it has ended, as its memory must be free for the next; returns its last words.

        A child whose standard input is closed ends by itself.
        """
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        child, self._child = self._child, None
        if child is None:
            return ""
        return await asyncio.to_thread(child.stop, seconds)


def _loaded(child: Child, task: EngineTask) -> Future[Loaded]:
    """What a child answers to its task, in a future: loading may take minutes; nothing is set if it dies first."""
    answer: Future[Loaded] = Future()

    def run() -> None:
        child.send(task)
        loaded = next(child.messages(Loaded), Loaded())
        with suppress(InvalidStateError):  # nobody waits any more
            answer.set_result(loaded)

    threading.Thread(target=run, name=f"start of {child.pid}", daemon=True).start()
    return answer
