"""An engine in this process: for notebooks, commands and tests, and inside every process that serves one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attn_core.errors import Unavailable, WrongState
from attn_models.loading.encoders import is_encoder
from attn_models.sources.gguf_files import folder_at
from attn_models.weights.manifest import fingerprint
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineConfig,
    EngineStats,
    ModelInfo,
    OutputDelta,
    Prompt,
    Tokenization,
)

from attn_engine.client import EmbedTask, EngineClient, TextTask
from attn_engine.host.encoder import EncoderHost
from attn_engine.host.engine import EngineHost, OpenRanks
from attn_engine.host.host import Deliver, ModelHost, with_process
from attn_engine.host.ranks import require_tensor_parallel
from attn_engine.host.request_preparation import Preparation
from attn_engine.host.weights import StagedWeights, give_back_memory
from attn_engine.request import RequestOutput
from attn_engine.state_transfer import PromptState


def open_host(folder: Path, config: EngineConfig, deliver: Deliver, open_ranks: OpenRanks | None = None) -> ModelHost:
    """Load the model in `folder`, or in a GGUF file: an encoder, or a model that generates; raises what loading raises.

    `open_ranks` is as in `EngineHost`. Raises `WrongState` for other files than those of `config.fingerprint`.
    """
    if config.fingerprint and fingerprint(folder) != config.fingerprint:
        raise WrongState(f"the files of {folder.name!r} have changed since it was loaded; unload it and load it again")
    folder = folder_at(folder)
    if is_encoder(folder):
        require_tensor_parallel(folder, config)
        return EncoderHost(folder, config)
    return EngineHost(folder, config, deliver, open_ranks)


class InProcess(EngineClient):
    """Runs the host on threads of this process; `open_ranks` is as in `open_host`.

    `receive`, if given, is called with all outputs, in place of `streams.deliver`.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        open_ranks: OpenRanks | None = None,
        receive: Callable[[Sequence[RequestOutput]], None] | None = None,
    ) -> None:
        super().__init__()
        self._config, self._open_ranks = config, open_ranks
        self._receive = receive or self.streams.deliver
        self._preparation = Preparation()
        self._host: ModelHost | None = None
        self._deliver: Deliver = lambda _: None
        self._weights, self._next = StagedWeights(folder), StagedWeights(folder)
        self._opened: tuple[ModelHost, StagedWeights] | None = None
        self._asleep = False

    @property
    def host(self) -> ModelHost:
        """The host that runs the model; raises `Unavailable` before `start` and after `stop`."""
        if self._host is None:
            raise Unavailable("the engine sleeps" if self._asleep else "the engine is not running")
        return self._host

    @property
    def alive(self) -> bool:
        """Whether the engine has not ended by itself."""
        return self._host is None or self._host.alive

    @property
    def changed(self) -> bool:
        """Whether the weights are others than those of the folder, or are not in memory."""
        return self._asleep or self._weights.folder is not None

    async def start(self) -> ModelInfo:
        """Load the model; returns when it is ready for tasks."""
        return await asyncio.to_thread(self.load, asyncio.get_running_loop())

    def load(self, loop: asyncio.AbstractEventLoop) -> ModelInfo:
        """Load the model in the calling thread, for tasks in an event loop of another one."""

        def deliver(outputs: Sequence[RequestOutput]) -> None:
            loop.call_soon_threadsafe(self._receive, outputs)

        self._deliver = deliver
        self._host = self._open(self._weights)
        return self._host.info

    def _open(self, weights: StagedWeights) -> ModelHost:
        config = self._config if weights.folder is None else self._config.replace(fingerprint="")
        return open_host(weights.folder or weights.base, config, self._deliver, self._open_ranks)

    async def sleep(self, shutdown_timeout: float) -> None:
        """See `EngineClient.sleep`."""
        if self._asleep:
            return
        host, self._host, self._asleep = self.host, None, True
        await asyncio.to_thread(host.stop, shutdown_timeout, WrongState("aborted: the model was put to sleep"))
        del host
        await asyncio.to_thread(give_back_memory)

    async def wake_up(self) -> None:
        """See `EngineClient.wake_up`."""
        if self._asleep:
            self._host = await asyncio.to_thread(self._open, self._weights)
            self._asleep = False

    async def update_weights(self, data: bytes, offset: int, shutdown_timeout: float, *, last: bool) -> None:
        """See `EngineClient.update_weights`."""
        await self.stage_weights(data, offset)
        if last:
            await self.open_staged()
            await self.use_staged(shutdown_timeout)

    async def stage_weights(self, data: bytes, offset: int) -> None:
        """Take a part of a file of weights, which nothing uses before `open_staged` and `use_staged`."""
        if not self.host.alive:
            raise Unavailable("the engine has ended")
        await asyncio.to_thread(self._next.write, data, offset)

    async def open_staged(self) -> None:
        """Check the weights that have arrived and load the model with them, beside the one that goes on running."""
        staged, self._next = self._next, StagedWeights(self._next.base)
        await asyncio.to_thread(staged.check)
        await self.drop_staged()
        self._opened = await asyncio.to_thread(self._open, staged), staged

    async def use_staged(self, shutdown_timeout: float) -> None:
        """Replace the running model by the one that `open_staged` has loaded."""
        host, opened = self.host, self._opened
        if opened is not None:
            (self._host, self._weights), self._opened = opened, None
            await asyncio.to_thread(host.stop, shutdown_timeout, WrongState("aborted: the model has other weights now"))

    async def drop_staged(self) -> None:
        """Free what `open_staged` has loaded, if it is not used."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await asyncio.to_thread(opened[0].stop, 0.0)

    def generate(self, task: TextTask) -> AsyncGenerator[OutputDelta, None]:
        """See `EngineClient.generate`; an engine in this process is not lost, so that nothing needs to be resumed."""
        return self.streams.follow(task, self.submit, self.cancel)

    async def submit(self, task: TextTask, state: PromptState | None = None) -> None:
        """Start a task, with the state of its prompt if another engine has computed it."""
        start: Any = self.host.submit if state is None else partial(self.host.submit, state=state)
        await asyncio.wrap_future(self._preparation.submit(self.host, task, start))

    async def prefill(self, task: TextTask) -> None:
        """Like `submit`, but only compute the prompt: the only output has its state."""
        await asyncio.wrap_future(self._preparation.submit(self.host, task, self.host.prefill))

    async def cancel(self, task_id: str) -> None:
        """Stop a task, whether it waits, is being prepared or runs."""
        if self._host is not None:
            self._preparation.cancel(self._host, task_id)

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens that `generate` would process for a prompt."""
        found: Tokenization = await asyncio.wrap_future(self._preparation.tokenize(self.host, prompt))
        return found

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, for tasks to use by this name."""
        await asyncio.to_thread(self.host.load_adapter, name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running tasks go on."""
        self.host.unload_adapter(name)

    async def stats(self) -> EngineStats:
        """The current engine statistics."""
        return with_process(EngineStats()) if self._asleep else self.host.stats()

    async def stop(self, shutdown_timeout: float) -> None:
        """Refuse new tasks, let running ones finish for up to `shutdown_timeout` seconds, then free everything."""
        self._asleep = False
        await self.drop_staged()
        if self._host is not None:
            host, self._host = self._host, None
            await asyncio.to_thread(host.stop, shutdown_timeout)

    async def _embed(self, task: EmbedTask) -> Embeddings:
        return await asyncio.wrap_future(self.host.embed(task))

    async def _attention_maps(self, request: AttentionMapsRequest, adapter: str) -> list[AttentionMap]:
        return await asyncio.to_thread(self.host.attention_maps, request, adapter)
