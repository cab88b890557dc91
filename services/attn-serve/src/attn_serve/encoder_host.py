"""A loaded encoder: what an actor or this process holds of a model that reads and writes nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from attn_core.errors import DeadlineExceeded, Incompatible, InvalidValue, Unavailable
from attn_models.encoder.sentences import load_sentence_encoder

from attn_serve.answers import EmbeddingsAnswer, LoadAnswer, MapAnswer, ModelInfo, SequenceAnswer, TokenizedAnswer
from attn_serve.kernels import use_kernel
from attn_serve.reader import Reader
from attn_serve.requests import EngineSettings, Generation, MapsWanted, PromptInput, TextsWanted

REFUSAL = "the model is an encoder: it turns texts into vectors and does nothing else"
GONE = "the model is being unloaded"
POSSIBLE = {"device": ("cpu",), "weights": ("auto", "unpacked"), "draft": (None,)}

Batches: TypeAlias = Iterator[tuple[list[int], torch.Tensor]]
"""Places of texts and their vectors, some at a time."""


class EncoderHost:
    """Loads the encoder in `folder`; calls take turns, batch by batch. All methods may be called from any thread.

    An encoder keeps no states, so settings about these change nothing. Raises `InvalidValue` for another device than
    the CPU, packed weights or a draft, and what loading raises.
    """

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        for name, allowed in POSSIBLE.items():
            if getattr(settings, name) not in allowed:
                words = " or ".join(str(value or "none") for value in allowed)
                raise InvalidValue.of(name, getattr(settings, name), f"{words} for an encoder")
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        self._encoder = load_sentence_encoder(folder, settings.dtype)
        use_kernel(self._encoder.model, settings.kernel)
        self._reader = Reader(self._encoder.tokenizer, has_source=False)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._idle = threading.Condition()
        self._stopping = False
        self._calls = 0
        self._tokens = 0

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        config, parameters = self._encoder.model.config, list(self._encoder.model.parameters())
        return ModelInfo(
            architecture="encoder",
            mechanisms=(config.mechanism,),
            parameters=sum(parameter.numel() for parameter in parameters),
            context=config.context,
            vocabulary=config.vocabulary,
            layers=config.layers,
            heads=config.heads,
            dtype=str(parameters[0].dtype).removeprefix("torch."),
            weights="unpacked",
            device=str(parameters[0].device),
            chat=False,
        )

    def embed(self, wanted: TextsWanted) -> EmbeddingsAnswer:
        """A vector of length 1 for each text.

        Raises `InvalidValue` for a text that does not fit, `DeadlineExceeded` within a batch of the time.
        """
        end = None if wanted.seconds is None else time.monotonic() + wanted.seconds
        with self._call():
            ids = self._encoder.read(wanted.texts)
            batches = self._encoder.batches(ids)
            vectors = torch.empty(len(ids), self._encoder.model.config.width)
            while (batch := self._turn(batches, end)) is not None:
                places, found = batch
                vectors[places] = found.float()
                self._tokens += sum(len(ids[place]) for place in places)
        shape = (len(ids), vectors.shape[1])
        return EmbeddingsAnswer(shape, vectors.numpy().astype("<f4").tobytes(), sum(map(len, ids)))

    def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a text, and the text they spell."""
        return self._reader.tokenize(prompt)

    def submit(self, generation: Generation) -> None:
        """Raises `Incompatible`: an encoder writes nothing."""
        raise Incompatible(REFUSAL, request=generation.id)

    def cancel(self, request: str) -> None:
        """Nothing is to cancel, as nothing was begun."""

    def score(self, prompts: Sequence[PromptInput], alternatives: int) -> list[SequenceAnswer]:
        """Raises `Incompatible`: an encoder has no log probabilities."""
        raise Incompatible(REFUSAL, prompts=len(prompts), alternatives=alternatives)

    def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Raises `Incompatible`: maps are drawn of models that write."""
        raise Incompatible(REFUSAL, layers=wanted.layers)

    def load(self) -> LoadAnswer:
        """How busy the encoder is; it holds no states."""
        running = min(self._calls, 1)
        return LoadAnswer(
            running=running,
            waiting=self._calls - running,
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
            self._idle.wait_for(lambda: self._calls == 0, timeout=grace)
        self._worker.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._idle:
            if self._stopping:
                raise Unavailable(GONE)
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _turn(self, batches: Batches, end: float | None) -> tuple[list[int], torch.Tensor] | None:
        """The next batch, once every other call has had its turn; None after the last."""
        left = None if end is None else max(0.0, end - time.monotonic())
        try:
            turn = self._worker.submit(next, batches, None)
        except RuntimeError as error:  # the thread has ended
            raise Unavailable(GONE) from error
        try:
            return turn.result(left)
        except TimeoutError:
            turn.cancel()
            raise DeadlineExceeded("the deadline passed before all texts were embedded") from None
        except CancelledError as error:
            raise Unavailable(GONE) from error
