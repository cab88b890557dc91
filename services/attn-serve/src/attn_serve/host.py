"""A loaded model with its engine: what an actor or this process holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_engine import EngineConfig, EngineLoop, Request, RequestOutput, SamplingParams, ScoringParams, build_engine
from attn_models.loading import LoadedModel, load_draft, load_model

from attn_serve.answers import (
    Chunk,
    EmbeddingsAnswer,
    LoadAnswer,
    MapAnswer,
    ModelInfo,
    TokenizedAnswer,
)
from attn_serve.kernels import use_kernel
from attn_serve.maps import compute_maps
from attn_serve.news import chunk_of
from attn_serve.reader import Reader
from attn_serve.requests import Asked, EngineSettings, MapsWanted, PromptInput, Scored, TextsWanted

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
        draft = (
            load_draft(Path(settings.draft), self._loaded, settings.dtype, settings.weights) if settings.draft else None
        )
        engine = build_engine(model, tokenizer, _config(settings), draft_model=draft)
        self._note = engine.note
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
                encoder_token_ids=self._reader.source(asked.prompt),
                params=_params(asked),
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
        load = self._loop.stats()
        return LoadAnswer(
            running=load.running,
            waiting=load.waiting,
            state_tokens_used=load.kv_tokens_used,
            state_tokens_total=load.kv_tokens_total,
            preemptions=load.preemptions,
            cached_tokens=load.cached_tokens,
            generated_tokens=load.generated_tokens,
            guessed_tokens=load.draft_tokens,
            accepted_tokens=load.accepted_tokens,
            computed_tokens=load.computed_tokens,
            reloaded_tokens=load.reloaded_tokens,
            offloaded_bytes=load.offloaded_bytes,
        )

    def stop(self, grace: float) -> None:
        """Refuse new work, let running work finish for up to `grace` seconds, then end the thread."""
        self._loop.drain(grace)
        self._loop.stop()

    def _listen(self, outputs: Sequence[RequestOutput]) -> None:
        self._deliver([chunk_of(output) for output in outputs])


def _config(settings: EngineSettings) -> EngineConfig:
    given: dict[str, Any] = {
        "kv_cache_memory_bytes": settings.state_bytes,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_batch_tokens,
        "num_speculative_tokens": settings.guesses,
    }
    return EngineConfig(
        kv_cache=settings.cache,
        kv_offload_bytes=settings.offload_bytes,
        speculative_tree_width=settings.branches,
        tenant_weights=dict(settings.shares),
        **{name: value for name, value in given.items() if value is not None},
    )


def _params(asked: Asked) -> SamplingParams | ScoringParams:
    return (
        ScoringParams(top_logprobs=asked.alternatives)
        if isinstance(asked, Scored)
        else SamplingParams(**asked.sampling)
    )
