"""The common interface of all hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import psutil
from attn_core.errors import AttnError, Incompatible
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineStats,
    ModelInfo,
    Prompt,
    Tokenization,
)

from attn_engine.client import EmbedTask, TextTask
from attn_engine.request import RequestOutput
from attn_engine.state_transfer import PromptState

THIS_PROCESS = psutil.Process()
Deliver = Callable[[Sequence[RequestOutput]], None]
"""Called on the engine's thread with all outputs of a step; must return at once."""


class ModelHost:
    """Base class of hosts of a loaded model. Calls that its kind of model does not support raise `Incompatible`.

    All methods may be called from any thread.
    """

    REFUSAL = "the model does not support this call"

    @property
    def info(self) -> ModelInfo:
        """A description of the model."""
        raise NotImplementedError

    def submit(self, task: TextTask, state: PromptState | None = None) -> None:
        """Start a task before the next engine step; its outputs are delivered. Raises a `UserError` if it is refused.

        With a `state` of its prompt, which another host of the same model has computed, only the last prompt token is
        computed.
        """
        raise Incompatible(self.REFUSAL, request=task.id, state=state is not None)

    def prefill(self, task: TextTask) -> None:
        """Like `submit`, but only compute the prompt: the only output has its state, for `submit` of another host."""
        raise Incompatible(self.REFUSAL, request=task.id)

    def cancel(self, task_id: str) -> None:
        """Stop a task before the next engine step or batch; unknown ids are ignored."""
        raise NotImplementedError

    def embed(self, task: EmbedTask) -> Future[Embeddings]:
        """Compute a unit vector for each text, in a future that may be cancelled."""
        raise Incompatible(self.REFUSAL, texts=len(task.texts))

    def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt and the text that was tokenised."""
        raise NotImplementedError

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in a folder, for tasks to use by this name; raises a `UserError` if it is refused."""
        raise Incompatible(f"adapter {name!r}: only decoders support adapters", adapter=name, folder=folder)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter: no further task can use it; running ones continue. Unknown names are ignored."""
        del name

    def attention_maps(self, request: AttentionMapsRequest, adapter: str = "") -> list[AttentionMap]:
        """The attention weights of a prompt, one map per layer, with the adapter if one is named."""
        del adapter
        raise Incompatible(self.REFUSAL, layers=request.layers)

    @property
    def alive(self) -> bool:
        """Whether the host can still process tasks."""
        return True

    def stats(self) -> EngineStats:
        """The current load of the model, and its counters."""
        raise NotImplementedError

    def stop(self, timeout: float, error: AttnError | None = None) -> None:
        """Refuse new tasks, let running ones finish for up to `timeout` seconds, then end them, with `error` if it is
        given, and the thread."""
        raise NotImplementedError


def with_process(stats: EngineStats) -> EngineStats:
    """The stats with the memory and the CPU time of this process filled in; every message of outputs has them."""
    memory = THIS_PROCESS.memory_info().rss
    return msgspec.structs.replace(stats, resident_memory_bytes=memory, cpu_seconds=time.process_time())
