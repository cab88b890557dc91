"""An engine in a Ray actor, which Ray starts again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

from attn_core.errors import AttnError, Unavailable
from attn_models.tokenizers import Tokenizer

from attn_serve.answers import (
    Chunk,
    EmbeddingsAnswer,
    LoadAnswer,
    MapAnswer,
    ModelInfo,
    SequenceAnswer,
    TokenizedAnswer,
)
from attn_serve.engines.scores import score_all
from attn_serve.engines.streams import Streams
from attn_serve.reader import Reader
from attn_serve.requests import Asked, EngineSettings, Generation, MapsWanted, PromptInput, Scored, TextsWanted

CALLS_AT_ONCE = 1000
RESTART_POLL_SECONDS = 0.2
SPINS = "10000"
LOST = "the engine died while it answered; it is being started again, ask once more"


class RayEngine:
    """Calls one `EngineActor`, and sorts its one stream of chunks out to the completions that wait."""

    def __init__(self, name: str, folder: Path, settings: EngineSettings) -> None:
        self._name = name
        self._folder = folder
        self._settings = settings
        self._streams = Streams()
        self._actor: Any = None
        self._listener: asyncio.Task[None] | None = None
        self._reader: Reader | None = None

    async def start(self) -> ModelInfo:
        """Start the actor and load the model in it."""
        import ray

        from attn_serve.engines.actor import EngineActor

        threads = str(self._settings.threads or os.cpu_count() or 1)
        # Threads that spin long while they wait for each other keep the processor from whoever else needs it.
        spins = os.environ.get("GOMP_SPINCOUNT", SPINS)
        # Ray would give an actor without CPUs of its own one thread for tensor operations.
        kind = ray.remote(EngineActor).options(
            num_cpus=0,
            max_concurrency=CALLS_AT_ONCE,
            max_restarts=-1,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": spins}},
        )
        self._actor = kind.remote(self._folder, self._settings)
        info = await self._call("start")
        self._reader = Reader(await asyncio.to_thread(Tokenizer.from_folder, self._folder))
        self._listener = asyncio.create_task(self._listen(), name=f"events of {self._name}")
        return cast(ModelInfo, info)

    def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """The chunks of a completion."""
        return self._follow(generation)

    async def score(self, wanted: Sequence[Scored]) -> list[SequenceAnswer]:
        """Log probabilities of given sequences."""
        return await score_all(self._follow, wanted)

    async def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a prompt, found in this process: asking the actor would take longer than finding them."""
        if self._reader is None:
            raise Unavailable(f"model {self._name!r} is not running")
        return await asyncio.to_thread(self._reader.tokenize, prompt)

    async def embed(self, wanted: TextsWanted) -> EmbeddingsAnswer:
        """A vector of length 1 for each text."""
        try:
            return cast(EmbeddingsAnswer, await self._call("embed", wanted))
        except asyncio.CancelledError:
            await asyncio.shield(self._cancel(wanted.id))
            raise

    async def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Attention weights."""
        return cast(list[MapAnswer], await self._call("attention_maps", wanted))

    async def load(self) -> LoadAnswer:
        """How busy the engine is."""
        return cast(LoadAnswer, await self._call("load"))

    async def pid(self) -> int:
        """The process that holds the model."""
        return cast(int, await self._call("pid"))

    async def stop(self, grace: float) -> None:
        """Let running work finish, then end the actor."""
        import ray

        if self._actor is None:
            return
        actor = self._actor
        try:
            await asyncio.wait_for(self._call("stop", grace), timeout=grace + 1)
        except (AttnError, TimeoutError):
            pass  # an actor that is gone or busy is killed just the same
        finally:
            self._actor = self._reader = None
            if self._listener is not None:
                self._listener.cancel()
            ray.kill(actor)
            self._streams.fail(Unavailable(f"model {self._name!r} is being unloaded"))

    def _follow(self, asked: Asked) -> AsyncIterator[Chunk]:
        return self._streams.follow(asked, self._submit, self._cancel)

    async def _submit(self, asked: Asked) -> None:
        await self._call("submit", asked)

    async def _cancel(self, request: str) -> None:
        with contextlib.suppress(Unavailable):  # a dead engine holds nothing
            await self._call("cancel", request)

    async def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        if self._actor is None:
            raise Unavailable(f"model {self._name!r} is not running")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, AttnError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise Unavailable(LOST) from error

    async def _listen(self) -> None:
        """Deliver chunks for as long as the engine is wanted, across restarts of its actor."""
        import ray

        while self._actor is not None:
            try:
                async for news in self._actor.events.options(num_returns="streaming").remote():
                    self._streams.deliver(await news)
            except ray.exceptions.RayError:
                self._streams.fail(Unavailable(LOST))
                await self._wait_for_restart()

    async def _wait_for_restart(self) -> None:
        while self._actor is not None:
            try:
                await self._call("start")
            except Unavailable:
                await asyncio.sleep(RESTART_POLL_SECONDS)
            else:
                return
