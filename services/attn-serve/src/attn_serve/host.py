"""A loaded model with its engine: what an actor or this process holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_engine import Engine, EngineLimits, EngineLoop, Event, Request, Sampling, Scoring
from attn_models.loading import LoadedModel, load_model

from attn_serve.answers import (
    Chunk,
    EmbeddingsAnswer,
    LoadAnswer,
    MapAnswer,
    ModelInfo,
    TokenizedAnswer,
)
from attn_serve.drafts import draft_of
from attn_serve.kernels import use_kernel
from attn_serve.maps import compute_maps
from attn_serve.memory import store_size
from attn_serve.news import chunk_of
from attn_serve.reader import Reader
from attn_serve.requests import Asked, EngineSettings, MapsWanted, PromptInput, Scored, TextsWanted

DRAFT_GUESSES = 4
"""Tokens that a draft guesses ahead where nobody says."""

NO_ENCODER = "the model is no encoder and cannot embed texts; load one that is, such as minilm"

Deliver = Callable[[list[Chunk]], None]
"""Called on the engine's thread with all news of a step; must return at once."""


class EngineHost:
    """Loads the model in `folder` and runs it on a thread. All methods may be called from any thread."""

    def __init__(self, folder: Path, settings: EngineSettings, deliver: Deliver) -> None:
        if settings.device != "cpu":
            raise InvalidValue.of("device", settings.device, "cpu")
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        self._loaded: LoadedModel = load_model(folder, settings.dtype, weights=settings.weights)
        model, tokenizer = self._loaded.model, self._loaded.tokenizer
        if tokenizer is None:
            raise InvalidValue.of("source", folder, "a model folder with a tokenizer.json")
        use_kernel(model, settings.kernel)
        self._deliver = deliver
        self._reader = Reader(tokenizer, has_source=self._loaded.source_context is not None)
        family = installed().caches.get(settings.cache)
        store = family.create(model.state_specs(), store_size(model, family, settings))
        step_tokens = EngineLimits.step_tokens if settings.max_batch_tokens is None else settings.max_batch_tokens
        guesses = (DRAFT_GUESSES if settings.draft else 0) if settings.guesses is None else settings.guesses
        limits = EngineLimits(
            step_tokens=step_tokens,
            guesses=guesses,
            branches=settings.branches,
            offload_bytes=settings.offload_bytes,
            shares=settings.shares,
        )
        draft = draft_of(Path(settings.draft), self._loaded, family, settings) if settings.draft else None
        engine = Engine(model, store, tokenizer, limits, draft=draft)
        self._note = engine.limits_note
        self._loop = EngineLoop(engine, self._listen)

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        model, mechanisms = self._loaded.model, self._loaded.mechanisms
        parameter = next(model.parameters())
        return ModelInfo(
            architecture=self._loaded.family,
            mechanisms=tuple(dict.fromkeys(mechanisms)),
            parameters=self._loaded.parameters,
            context=model.context,
            vocabulary=model.vocabulary,
            layers=len(mechanisms),
            heads=getattr(self._loaded.config, "heads", 0),
            dtype=str(parameter.dtype).removeprefix("torch."),
            weights=getattr(model, "weights", None) or "unpacked",
            device=str(parameter.device),
            chat=self._reader.chat,
            note=self._note,
        )

    def submit(self, asked: Asked) -> None:
        """Begin before the next engine step; raises the `UserError` that refuses it."""
        ids = self._reader.read(asked.prompt)
        self._loop.submit(
            Request(
                id=asked.id,
                token_ids=ids,
                source_ids=self._reader.source(asked.prompt),
                task=self._task(asked, len(ids)),
                deadline=None if asked.seconds is None else time.monotonic() + asked.seconds,
                scope=asked.tenant,
                tenant=asked.tenant,
            )
        )

    def cancel(self, request: str) -> None:
        """End what was begun before the next engine step."""
        self._loop.cancel(request)

    def embed(self, wanted: TextsWanted) -> Future[EmbeddingsAnswer]:
        """Raises `Incompatible`: a model that writes makes no vectors of texts."""
        raise Incompatible(NO_ENCODER, texts=len(wanted.texts))

    def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a prompt, and the text they spell."""
        return self._reader.tokenize(prompt)

    def attention_maps(self, wanted: MapsWanted) -> list[MapAnswer]:
        """Attention weights, a layer each."""
        return compute_maps(self._loaded, wanted, self._reader)

    def load(self) -> LoadAnswer:
        """How busy the engine is."""
        load = self._loop.load()
        return LoadAnswer(
            running=load.running,
            waiting=load.waiting,
            state_tokens_used=load.state_tokens_used,
            state_tokens_total=load.state_tokens_total,
            preemptions=load.preemptions,
            cached_tokens=load.shared_tokens,
            generated_tokens=load.generated_tokens,
            guessed_tokens=load.guessed_tokens,
            accepted_tokens=load.accepted_tokens,
            computed_tokens=load.computed_tokens,
            reloaded_tokens=load.reloaded_tokens,
            offloaded_bytes=load.offloaded_bytes,
        )

    def stop(self, grace: float) -> None:
        """Refuse new work, let running work finish for up to `grace` seconds, then end the thread."""
        self._loop.drain(grace)
        self._loop.stop()

    def _task(self, asked: Asked, prompt: int) -> Sampling | Scoring:
        if isinstance(asked, Scored):
            return Scoring(alternatives=asked.alternatives)
        return Sampling(**{"max_new_tokens": self._room(prompt), **asked.sampling})

    def _room(self, prompt: int) -> int:
        """New tokens where the caller does not say: the engine's default, or what the context still holds."""
        left: int = self._loaded.model.context - prompt
        return max(1, min(Sampling().max_new_tokens, left))

    def _listen(self, events: Sequence[Event]) -> None:
        self._deliver([chunk_of(event, self._reader.spelling) for event in events])
