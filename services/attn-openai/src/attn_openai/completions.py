"""POST /v1/completions, /v1/embeddings, /tokenize and /detokenize; GET /v1/models."""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attn_core.errors import InvalidValue
from attn_schema import (
    EmbedRequest,
    GenerateRequest,
    ModelInfo,
    OutputDelta,
    Prompt,
    ScoreRequest,
    Token,
    Usage,
)
from attn_schema.methods import EMBED, GENERATE, LIST_MODELS, SCORE, ListModelsRequest

from attn_openai.caller import HttpCaller
from attn_openai.chat import BROKEN_CHARACTER, FINISH_REASONS, Conversation, usage_of
from attn_openai.messages import turns_of
from attn_openai.requests import MAX_PROMPTS, CompletionRequest, EmbeddingsRequest
from attn_openai.tools import Tools

PAGE_SIZE = 1000


def prompts_of(given: Any) -> list[Prompt]:
    """The prompts of a request: a text, token ids, or a list of either; raises `InvalidValue`."""
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not isinstance(given, Sequence) or not given:
        raise InvalidValue.of("prompt", given, "a text, token ids, or a list of either")
    if all(isinstance(item, int) for item in given):
        return [Prompt.of(given)]
    if len(given) > MAX_PROMPTS:
        raise InvalidValue.of("prompt", f"{len(given)} prompts", f"at most {MAX_PROMPTS} prompts")
    found = []
    for place, item in enumerate(given):
        if isinstance(item, str):
            found.append(Prompt(text=item))
        elif isinstance(item, list) and item and all(isinstance(token, int) for token in item):
            found.append(Prompt.of(item))
        else:
            raise InvalidValue.of(f"prompt[{place}]", item, "a text or token ids")
    return found


def token_name(token_id: int, text: str) -> str:
    """A token as a dict key: its text, or its id for part of a character, as other parts have the same text."""
    return f"token_id:{token_id}" if BROKEN_CHARACTER in text else text


@dataclass
class CompletionState:
    """One completion during generation; `offset` is where its next token begins, in characters of the text."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None

    def take(self, delta: OutputDelta) -> dict[str, Any]:
        """Add a delta of the completion; returns the choice for the next chunk."""
        offset = self.offset
        self.text += delta.text
        self.tokens += delta.tokens
        self.offset += sum(len(token.text) for token in delta.tokens)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = FINISH_REASONS[delta.finish_reason], delta.stop_reason
        return self.shown(delta.text, delta.tokens, offset)

    def shown(self, text: str, tokens: Iterable[Token], offset: int = 0) -> dict[str, Any]:
        """A choice with this text and the log probabilities of these tokens, if they have any."""
        known = [token for token in tokens if token.logprob is not None or token.top_logprobs]
        return {
            "index": self.index,
            "text": text,
            "logprobs": _logprobs(list(tokens), offset) if known else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def _logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token_name(token.id, token.text) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {token_name(top.id, top.text): top.logprob for top in token.top_logprobs} if token.top_logprobs else None
            for token in tokens
        ],
        "text_offset": offsets,
    }


class Echo(NamedTuple):
    """A prompt to return: its text, its number of tokens, and, if requested, its tokens with log probabilities."""

    text: str = ""
    num_tokens: int = 0
    scored: tuple[Token, ...] = ()


@dataclass(frozen=True)
class CompletionTask:
    """The prompts of a request and its completions; choice i is completion i modulo n of prompt i // n."""

    request: CompletionRequest
    caller: HttpCaller
    prompts: list[Prompt]

    @classmethod
    def of(cls, request: CompletionRequest, caller: HttpCaller) -> CompletionTask:
        """Create the task of a request; raises `InvalidValue`."""
        return cls(request, caller, prompts_of(request.prompt))

    @property
    def n(self) -> int:
        """The number of completions per prompt."""
        return self.request.n or 1

    async def echoes(self) -> list[Echo]:
        """The prompts with which choices begin; empty ones without echo."""
        request, caller = self.request, self.caller
        if not request.echo:
            return [Echo()] * len(self.prompts)
        read = await asyncio.gather(*(caller.tokenize(request.model, prompt) for prompt in self.prompts))
        if request.logprobs is None:
            return [Echo(each.text, len(each.tokens)) for each in read]
        asked = ScoreRequest(model=request.model, prompts=tuple(self.prompts), top_logprobs=request.logprobs)
        scores = (await caller.unary(SCORE, asked)).scores
        return [Echo(each.text, len(each.tokens), score.tokens) for each, score in zip(read, scores, strict=True)]

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yield the deltas of all prompts as they arrive, with the index of the choice."""
        request = self.request
        given = request.sampling(request.token_limit, top_logprobs=request.logprobs)
        sampling = await self.caller.resolved(request.model, given)
        asked = [GenerateRequest(model=request.model, prompt=prompt, sampling=sampling) for prompt in self.prompts]
        streams = [self.caller.stream(GENERATE, each) for each in asked]
        async with aclosing(merged(streams)) as outputs:
            async for place, delta in outputs:
                yield place * self.n + delta.index, delta


async def merged(streams: Sequence[AsyncGenerator[OutputDelta, None]]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yield the deltas of all streams as they arrive, with the index of the stream; the first error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    outputs: asyncio.Queue[tuple[int, OutputDelta | BaseException | None]] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[OutputDelta, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for delta in stream:
                    outputs.put_nowait((place, delta))
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            end = error
        outputs.put_nowait((place, end))

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            place, output = await outputs.get()
            if isinstance(output, BaseException):
                raise output
            if output is None:
                running -= 1
            else:
                yield place, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(usages: Iterable[Usage]) -> Usage:
    total = Usage()
    for usage in usages:
        total = Usage(
            prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
            cached_tokens=total.cached_tokens + usage.cached_tokens,
            completion_tokens=total.completion_tokens + usage.completion_tokens,
        )
    return total


async def complete(request: CompletionRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return the whole completions. With echo and `max_tokens` 0, prompts are scored and nothing is generated."""
    task = CompletionTask.of(request, caller)
    echoes = await task.echoes()
    states = [CompletionState(index) for index in range(len(task.prompts) * task.n)]
    usages: list[Usage] = []
    if request.echo and request.token_limit == 0:
        usages = [Usage(prompt_tokens=echo.num_tokens) for echo in echoes]
        for state in states:
            state.finish_reason = "length"
    else:
        async with aclosing(task.deltas()) as deltas:
            async for index, delta in deltas:
                states[index].take(delta)
                usages += [delta.usage] if delta.usage else []
    choices = []
    for state in states:
        echo = echoes[state.index // task.n]
        choices.append(state.shown(echo.text + state.text, [*echo.scored, *state.tokens]))
    return {**_head(request, caller), "choices": choices, "usage": usage_of(_sum(usages))}


async def stream_completions(request: CompletionRequest, caller: HttpCaller) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the completions in chunks; with echo, the first chunk of each choice is its prompt."""
    if request.token_limit == 0:
        raise InvalidValue.of("max_tokens", 0, "at least 1 with stream")
    task = CompletionTask.of(request, caller)
    head = _head(request, caller)
    if request.include_usage:
        head["usage"] = None
    states = [CompletionState(index) for index in range(len(task.prompts) * task.n)]
    if request.echo:
        echoes = await task.echoes()
        for state in states:
            echo = echoes[state.index // task.n]
            state.offset = len(echo.text)
            yield {**head, "choices": [state.shown(echo.text, echo.scored)]}
    usages: list[Usage] = []
    async with aclosing(task.deltas()) as deltas:
        async for index, delta in deltas:
            usages += [delta.usage] if delta.usage else []
            yield {**head, "choices": [states[index].take(delta)]}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage_of(_sum(usages))}


def _head(request: CompletionRequest, caller: HttpCaller) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"cmpl-{caller.answer_id}", "object": "text_completion", "created": created, "model": request.model}


async def embed(request: EmbeddingsRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return an embedding for each text."""
    texts = request.texts()
    found = await caller.unary(EMBED, EmbedRequest(model=request.model, texts=tuple(texts)))
    size = found.embeddings.shape[1]
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidValue.of("dimensions", request.dimensions, f"1 to {size}, the size of the model's embeddings")
    rows = [truncated_embedding(row, request.dimensions or size) for row in found.rows()]
    data = [
        {"object": "embedding", "index": place, "embedding": encoded(row, request.encoding_format)}
        for place, row in enumerate(rows)
    ]
    tokens = found.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


def truncated_embedding(row: Sequence[float], dimensions: int) -> Sequence[float]:
    """The first `dimensions` components of a vector, scaled to norm 1; a whole vector is returned unchanged."""
    if dimensions == len(row):
        return row
    length = math.hypot(*row[:dimensions]) or 1.0
    return [value / length for value in row[:dimensions]]


def encoded(row: Sequence[float], encoding: str | None) -> list[float] | str:
    """A vector as numbers, or as base64 of float32 values in little-endian order."""
    if encoding != "base64":
        return list(row)
    values = array.array("f", row)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def model_of(info: ModelInfo) -> dict[str, Any]:
    """A model in OpenAI's format, with vLLM's `max_model_len`."""
    created = int(info.load_time.timestamp()) if info.load_time else 0
    return {
        "id": info.name, "object": "model", "created": created, "owned_by": "attn", "root": info.source,
        "max_model_len": info.max_seq_len,
    }  # fmt: skip


async def models(caller: HttpCaller) -> dict[str, Any]:
    """All models that this server serves."""
    listed = await caller.unary(LIST_MODELS, ListModelsRequest(page_size=PAGE_SIZE))
    return {"object": "list", "data": [model_of(info) for info in listed.models]}


async def tokenize(values: dict[str, Any], caller: HttpCaller) -> dict[str, Any]:
    """POST /tokenize, as in vLLM: the token ids of a prompt or a conversation."""
    given = values.keys() & {"prompt", "messages"}
    if values.keys() - {"model", "prompt", "messages"} or len(given) != 1 or not isinstance(values.get("model"), str):
        raise InvalidValue.of("body", sorted(values), "model, and one of prompt and messages")
    messages = values.get("messages")
    if "messages" in given:
        said = Conversation(turns_of(messages), Tools(), {})
        prompt = said.prompt(await caller.template(values["model"]))
    else:
        prompt = prompts_of(values["prompt"])[0]
    read, info = await asyncio.gather(caller.tokenize(values["model"], prompt), caller.model(values["model"]))
    ids = [token.id for token in read.tokens]
    return {"count": len(ids), "max_model_len": info.max_seq_len, "tokens": ids}


async def detokenize(values: dict[str, Any], caller: HttpCaller) -> dict[str, Any]:
    """POST /detokenize, as in vLLM: the text of token ids."""
    if values.keys() != {"model", "tokens"} or not isinstance(values["model"], str):
        raise InvalidValue.of("body", sorted(values), "model and tokens")
    return {"prompt": (await caller.tokenize(values["model"], Prompt(token_ids=values["tokens"]))).text}
