"""A loaded encoder: what an actor or this process holds of a model that reads and writes nothing."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from attn_core.errors import Incompatible, InvalidValue, Unavailable
from attn_models.loading.sentences import load_sentence_encoder

from attn_serve.answers import EmbeddingsAnswer, LoadAnswer, MapAnswer, ModelInfo, TokenizedAnswer
from attn_serve.embedding import Embedding
from attn_serve.kernels import use_kernel
from attn_serve.reader import Reader
from attn_serve.requests import Asked, EngineSettings, MapsWanted, PromptInput, TextsWanted

REFUSAL = "the model is an encoder: it turns texts into vectors and does nothing else"
GONE = "the model is being unloaded"
POSSIBLE = {"device": ("cpu",), "draft": (None,)}


class EncoderHost:
    """Loads the encoder in `folder`; calls take turns, batch by batch. All methods may be called from any thread.

    An encoder keeps no states, so settings about these change nothing. Raises `InvalidValue` for another device than
    the CPU or a draft, and what loading raises.
    """

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        for name, allowed in POSSIBLE.items():
            if getattr(settings, name) not in allowed:
                words = " or ".join(str(value or "none") for value in allowed)
                raise InvalidValue.of(name, getattr(settings, name), f"{words} for an encoder")
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        self._encoder = load_sentence_encoder(folder, settings.dtype, weights=settings.weights)
        use_kernel(self._encoder.model, settings.kernel)
        self._reader = Reader(self._encoder.tokenizer, has_source=False)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._idle = threading.Condition()
        self._stopping = False
        self._calls: dict[str, Embedding] = {}
        self._tokens = 0

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        model = self._encoder.model
        config, parameter = model.config, next(model.parameters())
        return ModelInfo(
            architecture="encoder",
            mechanisms=config.mechanisms,
            parameters=self._encoder.parameters,
            context=config.context,
            vocabulary=config.vocabulary,
            layers=config.layers,
            heads=config.heads,
            dtype=str(parameter.dtype).removeprefix("torch."),
            weights=getattr(model, "weights", None) or "unpacked",
            device=str(parameter.device),
            chat=False,
        )

    def embed(self, wanted: TextsWanted) -> Future[EmbeddingsAnswer]:
        """A vector of length 1 for each text, in a future that may be cancelled; raises `Unavailable` after `stop`.

        The future raises `InvalidValue` for a text that does not fit, `DeadlineExceeded` at the first turn after it.
        """
        call = Embedding(self._encoder, wanted)
        with self._idle:
            if self._stopping:
                raise Unavailable(GONE)
            self._calls[wanted.id] = call
        call.answer.add_done_callback(lambda _: self._leave(wanted.id))
        self._queue(call)
        return call.answer

    def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a text, and the text they spell."""
        return self._reader.tokenize(prompt)

    def submit(self, asked: Asked) -> None:
        """Raises `Incompatible`: an encoder writes nothing and has no log probabilities."""
        raise Incompatible(REFUSAL, request=asked.id)

    def cancel(self, request: str) -> None:
        """End an embedding; the batch that is being computed is its last."""
        call = self._calls.get(request)
        if call is not None:
            call.answer.cancel()

    def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Raises `Incompatible`: maps are drawn of models that write."""
        raise Incompatible(REFUSAL, layers=wanted.layers)

    def load(self) -> LoadAnswer:
        """How busy the encoder is; it holds no states."""
        calls = len(self._calls)
        running = min(calls, 1)
        return LoadAnswer(
            running=running,
            waiting=calls - running,
            state_tokens_used=0,
            state_tokens_total=0,
            preemptions=0,
            cached_tokens=0,
            generated_tokens=0,
            guessed_tokens=0,
            accepted_tokens=0,
            computed_tokens=self._tokens,
            reloaded_tokens=0,
            offloaded_bytes=0,
        )

    def stop(self, grace: float) -> None:
        """Refuse new work, let running calls finish for up to `grace` seconds, then end the thread."""
        with self._idle:
            self._stopping = True
            self._idle.wait_for(lambda: not self._calls, timeout=grace)
            left = list(self._calls.values())
        self._worker.shutdown(wait=False, cancel_futures=True)
        for call in left:
            call.fail(Unavailable(GONE))

    def _queue(self, call: Embedding) -> None:
        """Give it a turn once every other call has had one."""
        try:
            self._worker.submit(self._turn, call)
        except RuntimeError:  # the thread has ended
            call.fail(Unavailable(GONE))

    def _turn(self, call: Embedding) -> None:
        self._tokens += call.step()
        if not call.answer.done():
            self._queue(call)

    def _leave(self, request: str) -> None:
        with self._idle:
            del self._calls[request]
            self._idle.notify_all()
