"""Calls of the gateway's services on behalf of one HTTP request, with its metadata and deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from attn.v1 import inference_pb2, model_pb2
from attn_core.errors import ContextLengthExceeded
from attn_gateway import LocalCalls, Metadata
from attn_schema import (
    Embeddings,
    EmbedRequest,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    OutputDelta,
    Prompt,
    SamplingParams,
    ScoreRequest,
    SequenceScore,
    Tokenization,
    TokenizeRequest,
)
from attn_schema.codec import from_message, to_message

INFERENCE = "/attn.v1.InferenceService"
MODELS = "/attn.v1.ModelService"
PAGE_SIZE = 1000


@dataclass(frozen=True)
class HttpCaller:
    """Calls the services with the metadata of one HTTP request, until `deadline` on the clock of `time.monotonic()`.

    `kv_tokens` caches the capacity in tokens of each model's KV cache, by the model's name and load time.
    """

    calls: LocalCalls
    metadata: Metadata
    request_id: str
    deadline: float | None = None
    kv_tokens: dict[tuple[str, str], int] = field(default_factory=dict)

    def until(self, seconds: float | None) -> HttpCaller:
        """The same caller with a deadline `seconds` from now; None sets no deadline."""
        return replace(self, deadline=None if seconds is None else time.monotonic() + seconds)

    async def unary(self, method: str, request: Any) -> Any:
        """Call a method with a single response."""
        return await self.calls.unary(method, request, self.metadata, self.deadline)

    async def models(self) -> list[ModelInfo]:
        """All models that the caller may see, sorted by name."""
        answer = await self.unary(f"{MODELS}/ListModels", model_pb2.ListModelsRequest(page_size=PAGE_SIZE))
        return [from_message(ModelInfo, model) for model in answer.models]

    async def model(self, name: str) -> ModelInfo:
        """One model; raises `UnknownName`."""
        answer = await self.unary(f"{MODELS}/GetModel", model_pb2.GetModelRequest(name=name))
        return from_message(ModelInfo, answer.model)

    async def generate(self, model: str, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of completions."""
        request = to_message(GenerateRequest(model=model, prompt=prompt, sampling=sampling))
        answers = self.calls.stream(f"{INFERENCE}/Generate", request, self.metadata, self.deadline)
        async with aclosing(answers):
            async for answer in answers:
                yield from_message(OutputDelta, answer)

    async def score(self, model: str, prompts: Sequence[Prompt], top_logprobs: int) -> list[SequenceScore]:
        """Log probabilities of given sequences."""
        request = to_message(ScoreRequest(model=model, prompts=tuple(prompts), top_logprobs=top_logprobs))
        answer = await self.unary(f"{INFERENCE}/Score", request)
        return [from_message(SequenceScore, score) for score in answer.scores]

    async def tokenize(self, model: str, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt."""
        request = to_message(TokenizeRequest(model=model, prompt=prompt))
        return from_message(Tokenization, await self.unary(f"{INFERENCE}/Tokenize", request))

    async def embed(self, model: str, texts: Sequence[str]) -> Embeddings:
        """A vector for each text."""
        request = to_message(EmbedRequest(model=model, texts=tuple(texts)))
        return from_message(Embeddings, await self.unary(f"{INFERENCE}/Embed", request))

    async def stats(self, model: str) -> EngineStats:
        """The engine statistics of a model."""
        request = inference_pb2.GetEngineStatsRequest(model=model)
        return from_message(EngineStats, await self.unary(f"{INFERENCE}/GetEngineStats", request))

    async def with_room(self, model: str, prompt: Prompt) -> tuple[Prompt, int]:
        """The prompt as token ids, and the number of tokens for which context and KV cache still have room.

        Raises `ContextLengthExceeded` if there is no room.
        """
        info, tokenization = await asyncio.gather(self.model(model), self.tokenize(model, prompt))
        limit = info.max_seq_len
        loaded = (model, str(info.load_time))
        held = self.kv_tokens.get(loaded)
        if held is None:
            held = self.kv_tokens[loaded] = (await self.stats(model)).kv_tokens_total
        limit = min(limit, held) if held else limit
        ids = tuple(token.id for token in tokenization.tokens)
        if len(ids) >= limit:
            raise ContextLengthExceeded.of(len(ids), 1, limit)
        return prompt.replace(text=None, chat=None, token_ids=ids), limit - len(ids)
