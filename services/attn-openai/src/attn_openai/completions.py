"""POST /v1/completions, /v1/embeddings, /tokenize and /detokenize; GET /v1/models."""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
import time
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from operator import mul
from typing import Any, ClassVar, NamedTuple

from attn_core.errors import InvalidValue
from attn_schema import (
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    ModelInfo,
    ModelState,
    OutputDelta,
    Prompt,
    ScoreRequest,
    Token,
    TokenIds,
    TopLogprob,
    Usage,
)
from attn_schema.methods import (
    EMBED,
    GENERATE,
    LIST_MODELS,
    SCORE,
    SLEEP,
    WAKE_UP,
    ListModelsRequest,
    SleepRequest,
    WakeUpRequest,
)
from starlette.requests import Request

from attn_openai.caller import HttpCaller
from attn_openai.chat import FINISH_REASONS, Conversation, usage_of
from attn_openai.messages import turns_of
from attn_openai.requests import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeFields,
    EmbeddingsRequest,
    EncoderFields,
    RerankFields,
    ScoreFields,
    TokenizeFields,
    renamed,
)
from attn_openai.streams import Chunks, Events, JsonLines
from attn_openai.tools import Tools

PAGE_SIZE = 1000
MAX_EMBED_TEXTS = 1024


def prompts_of(given: Any, field: str = "prompt", most: int = MAX_PROMPTS) -> list[Prompt]:
    """The prompts in a field of a request: a text, token ids, or a list of either; raises `InvalidValue`."""
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not isinstance(given, Sequence) or not given:
        raise InvalidValue.of(field, given, "a text, token ids, or a list of either")
    if all(isinstance(item, int) for item in given):
        return [Prompt.of(given)]
    if len(given) > most:
        raise InvalidValue.of(field, f"{len(given)} texts", f"at most {most}")
    found = []
    for place, item in enumerate(given):
        if isinstance(item, str):
            found.append(Prompt(text=item))
        elif isinstance(item, list) and item and all(isinstance(token, int) for token in item):
            found.append(Prompt.of(item))
        else:
            raise InvalidValue.of(f"{field}[{place}]", item, "a text or token ids")
    return found


def token_name(token: Token | TopLogprob) -> str:
    """A token as a dict key: its text, or its bytes for part of a character, as other parts have the same text."""
    return "bytes:" + "".join(f"\\x{value:02x}" for value in token.raw) if token.raw else token.text


@dataclass
class CompletionState:
    """One completion during generation; `offset` is how many characters the text has before its next token."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    offset: int = 0
    _decoder: IncrementalDecoder = field(default_factory=partial(getincrementaldecoder("utf-8"), "replace"))
    finish_reason: str | None = None
    stop_reason: str | None = None

    def take(self, delta: OutputDelta) -> None:
        """Add a delta of the completion."""
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = FINISH_REASONS[delta.finish_reason], delta.stop_reason

    def shown(self, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """A choice with this text and the log probabilities of these tokens, if they have any."""
        known = [token for token in tokens if token.logprob is not None or token.top_logprobs]
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._logprobs(tokens) if known else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            # Tokens that are parts of one character all begin where it does; other bytes end one that is incomplete.
            spelled = token.raw or token.text.encode()
            if not 0x80 <= (spelled or b"\x00")[0] < 0xC0:
                self.offset += len(self._decoder.decode(b"", final=True))
            offsets.append(self.offset)
            self.offset += len(self._decoder.decode(spelled))
        return {
            "tokens": [token_name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {token_name(top): top.logprob for top in token.top_logprobs} if token.top_logprobs else None
                for token in tokens
            ],
            "text_offset": offsets,
        }


class Echo(NamedTuple):
    """A prompt to return: its text, its number of tokens, and, if requested, its tokens with log probabilities."""

    text: str = ""
    num_tokens: int = 0
    scored: tuple[Token, ...] = ()


class Completion:
    """POST /v1/completions; choice i is completion i modulo n of prompt i // n."""

    stream: ClassVar[type[JsonLines]] = Chunks

    def __init__(self, request: CompletionRequest, caller: HttpCaller) -> None:
        self._request, self._caller = request, caller
        self._prompts = prompts_of(request.prompt)
        self._n = request.n or 1
        self._states = [CompletionState(index) for index in range(len(self._prompts) * self._n)]
        self._usages: list[Usage] = []
        name, created = f"cmpl-{caller.answer_id}", int(time.time())
        self._head = {"id": name, "object": "text_completion", "created": created, "model": request.model}

    async def _echoes(self) -> list[Echo]:
        """The prompts with which choices begin; empty ones without echo."""
        request, caller = self._request, self._caller
        if not request.echo and request.prompt_logprobs is None:
            return [Echo()] * len(self._prompts)
        read = await asyncio.gather(*(caller.tokenize(request.model, prompt) for prompt in self._prompts))
        texts = [Echo(each.text if request.echo else "", len(each.tokens)) for each in read]
        if request.logprobs is None and request.prompt_logprobs is None:
            return texts
        most = max(request.logprobs or 0, request.prompt_logprobs or 0)
        asked = ScoreRequest(model=request.model, prompts=tuple(self._prompts), top_logprobs=most)
        scores = (await caller.unary(SCORE, asked)).scores
        return [echo._replace(scored=score.tokens) for echo, score in zip(texts, scores, strict=True)]

    async def _steps(self) -> AsyncGenerator[tuple[CompletionState, OutputDelta], None]:
        """Yield the deltas of all prompts as they arrive."""
        request = self._request
        given = request.sampling(request.token_limit, top_logprobs=request.logprobs)
        sampling = await self._caller.resolved(request.model, given)
        asked = [GenerateRequest(model=request.model, prompt=prompt, sampling=sampling) for prompt in self._prompts]
        async with aclosing(merged([self._caller.stream(GENERATE, each) for each in asked])) as outputs:
            async for place, delta in outputs:
                self._usages += [delta.usage] if delta.usage else []
                yield self._states[place * self._n + delta.index], delta

    async def complete(self) -> dict[str, Any]:
        """Return the whole completions. With echo and `max_tokens` 0, prompts are scored and nothing is generated."""
        request, echoes = self._request, await self._echoes()
        if request.echo and request.token_limit == 0:
            self._usages = [Usage(prompt_tokens=echo.num_tokens) for echo in echoes]
            for state in self._states:
                state.finish_reason = "length"
        else:
            async with aclosing(self._steps()) as steps:
                async for state, delta in steps:
                    state.take(delta)
        choices = []
        for state in self._states:
            echo = echoes[state.index // self._n]
            before = echo.scored if request.echo and request.logprobs is not None else ()
            choice = state.shown(echo.text + state.text, [*before, *state.tokens])
            if request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_of(echo.scored, request.prompt_logprobs)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": usage_of(_sum(self._usages))}

    async def events(self) -> Events:
        """Yield the completions in chunks; with echo, the first chunk of each choice is its prompt."""
        request, head = self._request, self._head
        if request.token_limit == 0:
            raise InvalidValue.of("max_tokens", 0, "at least 1 with stream")
        if request.include_usage:
            head["usage"] = None
        if request.echo:
            echoes = await self._echoes()
            for state in self._states:
                echo = echoes[state.index // self._n]
                yield {**head, "choices": [state.shown(echo.text, echo.scored)]}
                state.offset = len(echo.text)
        async with aclosing(self._steps()) as steps:
            async for state, delta in steps:
                state.take(delta)
                yield {**head, "choices": [state.shown(delta.text, delta.tokens)]}
        if request.include_usage:
            yield {**head, "choices": [], "usage": usage_of(_sum(self._usages))}


def prompt_logprobs_of(tokens: Sequence[Token], count: int) -> list[dict[str, Any] | None]:
    """The log probabilities of a prompt's tokens as vLLM returns them: by token id; None for the first token."""
    found: list[dict[str, Any] | None] = []
    for token in tokens:
        ranked = {top.id: (place, top) for place, top in enumerate(token.top_logprobs[:count], 1)}
        rows = {str(i): _logprob(top.logprob, rank, top.text) for i, (rank, top) in ranked.items()}
        if token.logprob is not None and token.id not in ranked:
            rows[str(token.id)] = _logprob(token.logprob, None, token.text)
        found.append(rows if token.logprob is not None else None)
    return found


def _logprob(logprob: float, rank: int | None, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


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


async def embed(request: EmbeddingsRequest, caller: HttpCaller) -> dict[str, Any]:
    """Return an embedding for each text."""
    found = await _embedded(request, "input", prompts_of(request.input, "input", MAX_EMBED_TEXTS), caller)
    size = found.embeddings.shape[1]
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidValue.of("dimensions", request.dimensions, f"1 to {size}, the size of the model's embeddings")
    rows = [truncated_embedding(row, request.dimensions or size) for row in found.rows()]
    data = [
        {"object": "embedding", "index": place, "embedding": encoded(row, request.encoding_format)}
        for place, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": request.model, "usage": _encoder_usage(found)}


async def _embedded(request: EncoderFields, field: str, prompts: Sequence[Prompt], caller: HttpCaller) -> Embeddings:
    """The vectors of texts, which were sent in `field`; raises `InvalidValue`."""
    limit = request.truncate_prompt_tokens
    if limit in (0, -1):
        limit = (await caller.model(request.model)).max_seq_len
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    ids = [TokenIds(ids=prompt.token_ids) for prompt in prompts if prompt.token_ids is not None]
    if texts and ids:
        raise InvalidValue.of(field, "texts and token ids", "either")
    try:
        asked = EmbedRequest(model=request.model, texts=tuple(texts), token_ids=tuple(ids), max_tokens=limit)
        return await caller.unary(EMBED, asked)
    except InvalidValue as error:
        given = str(error.metadata.get("field", ""))
        raise renamed(error, given.replace("texts", field, 1)) from error


def _encoder_usage(found: Embeddings) -> dict[str, int]:
    return {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.prompt_tokens}


def _cosine(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(map(mul, left, right)) / (math.hypot(*left) * math.hypot(*right))


async def score(request: ScoreFields, caller: HttpCaller) -> dict[str, Any]:
    """POST /score, as vLLM with an encoder of texts: the cosine of each pair of vectors."""
    left, right = (prompts_of(getattr(request, name), name, MAX_EMBED_TEXTS) for name in ("text_1", "text_2"))
    if len(left) not in (1, len(right)):
        raise InvalidValue.of("text_1", f"{len(left)} texts", f"1 or {len(right)}, as many as in text_2")
    found = await _embedded(request, "text_2", [*left, *right], caller)
    rows = found.rows()
    firsts, seconds = rows[: len(left)] * (len(right) // len(left)), rows[len(left) :]
    data = [
        {"index": place, "object": "score", "score": _cosine(*pair)}
        for place, pair in enumerate(zip(firsts, seconds, strict=True))
    ]
    head = {"id": f"score-{caller.answer_id}", "object": "list", "created": int(time.time()), "model": request.model}
    return {**head, "data": data, "usage": _encoder_usage(found)}


async def rerank(request: RerankFields, caller: HttpCaller) -> dict[str, Any]:
    """POST /rerank, as vLLM, Jina and Cohere: the documents by their cosine with the query, the nearest first."""
    prompts = [Prompt(text=text) for text in (request.query, *request.documents)]
    found = await _embedded(request, "documents", prompts, caller)
    query, *rows = found.rows()
    scores = [_cosine(query, row) for row in rows]
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: request.top_n or None]
    shown = request.documents if request.return_documents else ()
    results = [
        {"index": place, "relevance_score": scores[place]} | ({"document": {"text": shown[place]}} if shown else {})
        for place in order
    ]
    usage = {"total_tokens": found.usage.prompt_tokens}
    return {"id": f"rerank-{caller.answer_id}", "model": request.model, "usage": usage, "results": results}


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


async def loaded_models(caller: HttpCaller) -> tuple[ModelInfo, ...]:
    """All models that this server serves."""
    return (await caller.unary(LIST_MODELS, ListModelsRequest(page_size=PAGE_SIZE))).models


async def models(caller: HttpCaller) -> dict[str, Any]:
    """GET /v1/models."""
    return {"object": "list", "data": [model_of(info) for info in await loaded_models(caller)]}


async def named_or_only(asked: Request, caller: HttpCaller, *others: str) -> ModelInfo:
    """The model that a query names, or the only one. Raises `InvalidValue` for parameters besides `others`."""
    unknown = sorted(set(asked.query_params) - {"model", *others})
    found = await loaded_models(caller)
    name = asked.query_params.get("model", found[0].name if len(found) == 1 else "")
    if unknown or not name:
        given = ", ".join(unknown) or f"no model, of {len(found)}"
        raise InvalidValue.of("query", given, ", ".join(("model", *others)))
    return await caller.model(name)


async def sleep(asked: Request, caller: HttpCaller) -> dict[str, Any]:
    """POST /sleep, as in vLLM; at every level the weights can be loaded again. `mode` abort does not wait."""
    model, mode = await named_or_only(asked, caller, "level", "mode"), asked.query_params.get("mode", "wait")
    if mode not in ("abort", "wait"):
        raise InvalidValue.of("mode", mode, "abort or wait")
    await caller.unary(SLEEP, SleepRequest(name=model.name, shutdown_timeout=0.0 if mode == "abort" else None))
    return await is_sleeping(asked, caller)


async def wake_up(asked: Request, caller: HttpCaller) -> dict[str, Any]:
    """POST /wake_up, as in vLLM."""
    model = await named_or_only(asked, caller)
    await caller.unary(WAKE_UP, WakeUpRequest(name=model.name))
    return await is_sleeping(asked, caller)


async def is_sleeping(asked: Request, caller: HttpCaller) -> dict[str, Any]:
    """GET /is_sleeping, as in vLLM."""
    model = await named_or_only(asked, caller, "level", "mode")
    return {"is_sleeping": model.state is ModelState.SLEEPING}


async def tokenize(request: TokenizeFields, caller: HttpCaller) -> dict[str, Any]:
    """POST /tokenize, as in vLLM: the token ids of a prompt or a conversation."""
    if request.messages is None:
        (prompt,) = prompts_of(request.prompt)
        read = await caller.tokenize(request.model, prompt)
    else:
        names = (
            "model",
            "messages",
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        )
        asked = ChatCompletionRequest(**{name: getattr(request, name) for name in names})
        tools = Tools.read(asked.tools, None)
        said = Conversation(turns_of(asked.messages), tools, asked.template_values)
        _, read = await said.read(request.model, await caller.template(request.model), caller)
    ids = [token.id for token in read.tokens]
    strings = [token.text for token in read.tokens] if request.return_token_strs else None
    limit = (await caller.model(request.model)).max_seq_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}


async def detokenize(request: DetokenizeFields, caller: HttpCaller) -> dict[str, Any]:
    """POST /detokenize, as in vLLM: the text of token ids."""
    return {"prompt": (await caller.tokenize(request.model, Prompt(token_ids=request.tokens))).text}
