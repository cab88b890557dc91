"""The client of this process itself."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType

from attn_client.results.inference import Chunk
from attn_client.sampling import Prompt, Sampling
from attn_client.writer import Writer
from attn_core.errors import InvalidValue, WrongState
from attn_core.kernels.linear import WEIGHT_CHOICES
from attn_engine import EngineConfig
from attn_models.loading.sentences import SentenceEncoder, load_sentence_encoder
from attn_models.sources.store import ModelStore

from attn_local.running import RunningModel


class LocalClient(Writer):
    """Answers as `attn_client.Client` does, from models that run in this process. Use it in a `with` block.

    A model is named as under the `models` of `home`, or by its folder; it is loaded when it is first asked, and stays.
    `weights`, one of `WEIGHT_CHOICES`, says how linear layers keep theirs. Threads may share a client. Raises
    the errors of `attn_core.errors`.
    """

    def __init__(self, home: Path | None = None, weights: str = "auto") -> None:
        self._shelf = ModelStore(home)
        self._weights = weights
        self._branches = 1
        self._running: dict[Path, RunningModel] = {}
        self._drafts: dict[Path, Path] = {}
        self._encoders: dict[Path, SentenceEncoder] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all models; running completions are cancelled."""
        with self._lock:
            for model in self._running.values():
                model.stop()
            self._running.clear()
            self._encoders.clear()

    def generate(
        self, model: str, prompt: Prompt, sampling: Sampling | None = None, *, timeout: float | None = None
    ) -> Generator[Chunk, None, None]:
        """The completion of a prompt, piece by piece; closing the iterator cancels it. `timeout` is in seconds."""
        return self._run(model).generate(prompt, sampling or Sampling(), timeout)

    def keep(self, weights: str) -> None:
        """Keep the weights of linear layers so, one of `WEIGHT_CHOICES`, in models that do not run yet.

        Raises `InvalidValue` for other words.
        """
        if weights not in WEIGHT_CHOICES:
            raise InvalidValue.of("weights", weights, ", ".join(WEIGHT_CHOICES))
        self._weights = weights

    def guess(self, branches: int) -> None:
        """Let guesses go on in so many ways, from 1 to 8, in models that do not run yet; `InvalidValue` for others."""
        self._branches = EngineConfig(speculative_tree_width=branches).speculative_tree_width

    def draft(self, model: str, draft: str) -> None:
        """Let a smaller model of the same tokens guess for `model`, which is not asked yet: the same text, sooner.

        Raises `WrongState` for a model that runs; a draft that does not fit is refused when the model is asked.
        """
        folder, smaller = self._shelf.find(model), self._shelf.find(draft)
        with self._lock:
            if folder in self._running:
                raise WrongState(f"model {model!r} runs already; a draft is named before it is asked", model=model)
            self._drafts[folder] = smaller

    def embed(self, model: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text, from an encoder; raises `InvalidValue` for a text that does not fit."""
        folder = self._shelf.find(model)
        with self._lock:
            if folder not in self._encoders:
                self._encoders[folder] = load_sentence_encoder(folder)
            return [tuple(row) for row in self._encoders[folder].embed(texts).tolist()]

    def only_chat_model(self) -> str:
        """The one model of this machine that can chat; raises `UserError` where there is not exactly one."""
        return self._shelf.only_chat_model()

    def _run(self, model: str) -> RunningModel:
        folder = self._shelf.find(model)
        with self._lock:
            if folder not in self._running:
                self._running[folder] = RunningModel(folder, self._weights, self._drafts.get(folder), self._branches)
            return self._running[folder]
