"""Calls of the gateway's services on behalf of one HTTP request, with its metadata and deadline."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from attn_core.errors import ContextLengthExceeded, DeadlineExceeded
from attn_gateway import Call, Calls, Metadata
from attn_gateway.call import tenant_of
from attn_schema import ModelInfo, Prompt, SamplingParams, Tokenization, TokenizeRequest
from attn_schema.methods import (
    GET_ENGINE_STATS,
    GET_MODEL,
    TOKENIZE,
    GetEngineStatsRequest,
    GetModelRequest,
    Method,
    Response,
)
from attn_schema.sampling import ResolvedSamplingParams

from attn_openai.answers import AnswerStore
from attn_openai.templates import ChatTemplate, inspect

DEFAULT_TEMPERATURE = 1.0


@dataclass(frozen=True)
class HttpCaller:
    """Calls the services with the metadata of one HTTP request, until `deadline` on the clock of `time.monotonic()`.

    That is also the event loop's clock. `kv_tokens` caches the capacity in tokens of each model's KV cache, and
    `templates` what its chat template takes, by the model's name and load time.
    """

    calls: Calls
    metadata: Metadata
    request_id: str
    deadline: float | None = None
    kv_tokens: dict[tuple[str, str], int] = field(default_factory=dict)
    templates: dict[tuple[str, str], ChatTemplate] = field(default_factory=dict)
    answers: AnswerStore = field(default_factory=AnswerStore)
    made: deque[Call] = field(default_factory=lambda: deque(maxlen=1))
    """The latest call."""
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id of the answer, unlike that of the request, which callers may choose."""

    @property
    def owner(self) -> str:
        """Who calls, as known by the token: nobody else may go on with the same conversation."""
        return tenant_of(self.metadata)

    def until(self, seconds: float | None) -> HttpCaller:
        """The same caller with a deadline `seconds` from now; None sets no deadline."""
        return replace(self, deadline=None if seconds is None else time.monotonic() + seconds)

    async def unary(self, row: Method[Any, Response], request: Any) -> Response:
        """Make a call with one response; raises `DeadlineExceeded` at the deadline."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self.calls.unary(row, request, self._call())
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the call was answered") from error

    def stream(self, row: Method[Any, Response], request: Any) -> AsyncGenerator[Response, None]:
        """Make a call with a stream of responses; the deadline is only passed to its handler."""
        return self.calls.stream(row, request, self._call())

    def _call(self) -> Call:
        counted = bool(self.made)
        call = Call(request_id=self.request_id, deadline=self.deadline, metadata=self.metadata, counted=counted)
        self.made.append(call)
        return call

    def headers(self) -> dict[str, str]:
        """The id of the request and what is left of the tenant's limits, for the head of the answer."""
        rates = self.made[-1].rates() if self.made else {}
        found = {"x-request-id": self.request_id}
        for name, rate in rates.items():
            found[f"x-ratelimit-limit-{name}"] = f"{rate.limit:g}"
            found[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
            found[f"x-ratelimit-reset-{name}"] = f"{math.ceil(rate.reset_seconds * 1000)}ms"
        return found

    async def model(self, name: str) -> ModelInfo:
        """One model; raises `UnknownName`."""
        return (await self.unary(GET_MODEL, GetModelRequest(name=name))).model

    async def resolved(self, model: str, sampling: SamplingParams) -> ResolvedSamplingParams:
        """Sampling parameters with what the request leaves out: as the model recommends, else OpenAI's temperature."""
        wished = (await self.model(model)).recommended_sampling
        return sampling.resolved({"temperature": DEFAULT_TEMPERATURE} | wished)

    async def tokenize(self, model: str, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt."""
        return await self.unary(TOKENIZE, TokenizeRequest(model=model, prompt=prompt))

    async def template(self, model: str) -> ChatTemplate:
        """The forms that a model's chat template takes; those of one that writes nothing if it has none."""
        patient = self.until(None)  # a deadline that has passed is found, and counted, by the next call
        info = await patient.model(model)
        loaded = (model, str(info.load_time))
        if loaded not in self.templates:
            found = await inspect(partial(patient.tokenize, model)) if info.chat else ChatTemplate()
            self.templates[loaded] = found
        return self.templates[loaded]

    async def room(self, model: str, tokenization: Tokenization) -> int:
        """The number of tokens for which context and KV cache have room after a prompt.

        Raises `ContextLengthExceeded` if there is no room.
        """
        info = await self.model(model)
        limit = info.max_seq_len
        loaded = (model, str(info.load_time))
        held = self.kv_tokens.get(loaded)
        if held is None:
            stats = await self.unary(GET_ENGINE_STATS, GetEngineStatsRequest(model=model))
            held = self.kv_tokens[loaded] = stats.kv_tokens_total
        limit = min(limit, held) if held else limit
        length = len(tokenization.tokens)
        if length >= limit:
            raise ContextLengthExceeded.of(length, 1, limit)
        return limit - length
