"""Requests to loaded models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from attn.v1 import inference_pb2 as wire
from attn.v1 import inference_pb2_grpc
from attn_core.errors import InvalidValue
from attn_gateway import Context, call_of

from attn_serve import convert
from attn_serve.answers import UsageAnswer
from attn_serve.fleet import Fleet
from attn_serve.requests import MapsWanted

MOST_ALTERNATIVES = 20
MOST_TEXTS = 1024


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers from the engines of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Generate(  # noqa: N802  the wire's name
        self, request: wire.GenerateRequest, context: Context
    ) -> AsyncIterator[wire.GenerateResponse]:
        """Stream a completion; a caller who goes away cancels it."""
        engine = self._fleet.engine(request.model)
        generation = convert.generation_of(request, call_of(context))
        async with aclosing(engine.generate(generation)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield convert.chunk_message(chunk)

    async def Score(self, request: wire.ScoreRequest, context: Context) -> wire.ScoreResponse:  # noqa: N802
        """Score given sequences; a caller who goes away cancels."""
        engine = self._fleet.engine(request.model)
        if not request.prompts:
            raise InvalidValue.of("prompts", [], "at least one prompt")
        if not 0 <= request.top_logprobs <= MOST_ALTERNATIVES:
            raise InvalidValue.of("top_logprobs", request.top_logprobs, f"0 to {MOST_ALTERNATIVES}")
        scores = await engine.score(convert.scored_of(request, call_of(context)))
        read = sum(len(score.tokens) for score in scores)
        usage = UsageAnswer(prompt=read, cached=0, completion=0)
        return wire.ScoreResponse(
            scores=[convert.score_message(score) for score in scores], usage=convert.usage_message(usage)
        )

    async def Embed(self, request: wire.EmbedRequest, context: Context) -> wire.EmbedResponse:  # noqa: N802
        """Turn texts into vectors; a caller who goes away cancels."""
        engine = self._fleet.engine(request.model)
        if not 1 <= len(request.texts) <= MOST_TEXTS:
            raise InvalidValue.of("texts", f"{len(request.texts)} texts", f"1 to {MOST_TEXTS} texts")
        return convert.embeddings_message(await engine.embed(convert.texts_of(request, call_of(context))))

    async def Tokenize(self, request: wire.TokenizeRequest, context: Context) -> wire.TokenizeResponse:  # noqa: N802, ARG002
        """Say what tokens a prompt becomes."""
        answer = await self._fleet.engine(request.model).tokenize(convert.prompt_of(request.prompt))
        return wire.TokenizeResponse(tokens=[convert.token_message(token) for token in answer.tokens], text=answer.text)

    async def AttentionMaps(  # noqa: N802
        self,
        request: wire.AttentionMapsRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[wire.AttentionMapsResponse]:
        """Stream attention weights, a layer a message."""
        engine = self._fleet.engine(request.model)
        wanted = MapsWanted(
            prompt=convert.prompt_of(request.prompt), layers=tuple(request.layers), heads=tuple(request.heads)
        )
        for answer in await engine.attention_maps(wanted):
            yield convert.map_message(answer)

    async def GetLoad(self, request: wire.GetLoadRequest, context: Context) -> wire.GetLoadResponse:  # noqa: N802, ARG002
        """Say how busy a model's engine is."""
        load = await self._fleet.engine(request.model).load()
        return wire.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            state_tokens_used=load.state_tokens_used,
            state_tokens_total=load.state_tokens_total,
            preemptions=load.preemptions,
            cached_tokens=load.cached_tokens,
            generated_tokens=load.generated_tokens,
            guessed_tokens=load.guessed_tokens,
            accepted_tokens=load.accepted_tokens,
            computed_tokens=load.computed_tokens,
            reloaded_tokens=load.reloaded_tokens,
            offloaded_bytes=load.offloaded_bytes,
        )
