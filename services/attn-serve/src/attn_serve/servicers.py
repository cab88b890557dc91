# ruff: noqa: N802 - the names of calls are the interface's
"""The gRPC services of models: inference, and loading, scaling and unloading models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import msgspec
from attn.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from attn_core.errors import InvalidValue, OutOfCapacity, UserError
from attn_engine.client import EngineClient
from attn_engine.host import EmbedTask, TextTask
from attn_gateway import Call, Context, call_of, page_of
from attn_gateway.call import Caller, Charge
from attn_gateway.interceptors.wire import LARGE_BYTES
from attn_schema import (
    AttentionMapsRequest,
    DeploymentConfig,
    EmbedRequest,
    EngineConfig,
    GenerateRequest,
    Prompt,
    Resumption,
    SamplingParams,
    ScoreRequest,
    ScoringParams,
    TokenizeRequest,
    Usage,
)
from attn_schema.codec import from_message, to_message
from attn_schema.sampling import DEFAULT_MAX_NEW_TOKENS

from attn_serve.fleet import Fleet
from attn_serve.refusals import RequestSize
from attn_serve.served_model import require_serving
from attn_serve.versions import base_name

DEFAULT_SHUTDOWN_TIMEOUT = 30.0
MAX_SHUTDOWN_TIMEOUT = 3600.0
Noun = TypeVar("Noun", bound=msgspec.Struct)


def text_task(
    prompt: Prompt,
    params: SamplingParams | ScoringParams,
    call: Call,
    adapter: str,
    resume: Resumption | None = None,
) -> TextTask:
    """A task with a new id, and the deadline and tenant of the call."""
    return TextTask(
        prompt=prompt, params=params, timeout=call.remaining(), tenant=call.tenant, adapter=adapter, resume=resume
    )


BYTES_PER_TOKEN = 4
"""The usual number of bytes of a token, by which tokens of a text are estimated before it is tokenized."""


def estimated_tokens(prompt: Prompt) -> int:
    """The number of tokens of a prompt, and of its encoder prompt: exact for token ids, else by bytes of the text."""
    parts = [part for part in (prompt, prompt.encoder_prompt) if part is not None]
    texts = [*(part.text or "" for part in parts), *(message.content for message in prompt.chat or ())]
    ids = sum(len(part.token_ids or ()) for part in parts)
    return ids + -(-sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN)


def most_new_tokens(params: SamplingParams) -> int:
    """The most tokens that a request may generate."""
    each = DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    return each * max(params.n, params.num_beams or 1)


@contextmanager
def refused_is_free(charge: Charge) -> Iterator[None]:
    """Count no tokens for a request that is refused before anything is computed."""
    try:
        yield
    except (UserError, OutOfCapacity):
        charge.prompt_tokens = charge.new_tokens = 0
        raise


async def read(noun: type[Noun], request: Any) -> Noun:
    """Decode a request message, in a thread if it has more than `LARGE_BYTES` bytes.

    Decoding millions of token ids or chat messages would block other calls.
    """
    if request.ByteSize() <= LARGE_BYTES:
        return from_message(noun, request)
    return await asyncio.to_thread(from_message, noun, request)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Runs inference requests on the models of a fleet; a request is cancelled when its client disconnects."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream the completions of a prompt."""
        call = call_of(context)
        self._engine(request.model, call)  # an unknown model is reported before any other error
        size = self._size_of(request, call)
        decoded = await read(GenerateRequest, request)
        first_version = decoded.resume.model if decoded.resume else ""
        if first_version and base_name(first_version) != base_name(decoded.model):
            raise InvalidValue.of("resume.model", first_version, f"a version of {decoded.model!r}")
        model = self._fleet.choose(first_version or decoded.model, decoded.prompt, call.caller.sees)
        served_name = "" if model.name == decoded.model else model.name
        task = text_task(decoded.prompt, decoded.sampling, call, model.adapter, decoded.resume)
        most = most_new_tokens(decoded.sampling)
        call.charge.reserve(estimated_tokens(decoded.prompt), most)
        # Beams show their tokens only at the end: who hangs up before pays for all.
        shown = not decoded.sampling.num_beams
        call.charge.new_tokens = 0 if shown else most
        with refused_is_free(call.charge), model.refusals.apply(size):
            async with aclosing(model.engine.generate(task)) as deltas:
                async for delta in deltas:
                    call.charge.new_tokens += len(delta.tokens) if shown else 0
                    if delta.usage:
                        call.charge.prompt_tokens = delta.usage.prompt_tokens
                        call.charge.new_tokens = delta.usage.completion_tokens
                    yield to_message(delta.replace(model=served_name) if served_name else delta)
                    served_name = ""

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        """Return the log probabilities of given sequences."""
        call = call_of(context)
        self._engine(request.model, call)
        size = self._size_of(request, call)
        decoded = await read(ScoreRequest, request)
        model = self._fleet.choose(decoded.model, decoded.prompts[0], call.caller.sees)
        params = ScoringParams(top_logprobs=decoded.top_logprobs)
        call.charge.reserve(sum(map(estimated_tokens, decoded.prompts)))
        with refused_is_free(call.charge), model.refusals.apply(size):
            tasks = [text_task(prompt, params, call, model.adapter) for prompt in decoded.prompts]
            scores = await model.engine.score(tasks)
        usage = Usage(prompt_tokens=sum(len(score.tokens) for score in scores))
        call.charge.prompt_tokens = usage.prompt_tokens
        return inference_pb2.ScoreResponse(scores=map(to_message, scores), usage=to_message(usage))

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        """Return the embeddings of texts."""
        call = call_of(context)
        self._engine(request.model, call)
        decoded = await read(EmbedRequest, request)
        engine = self._fleet.choose(decoded.model, Prompt(text=decoded.texts[0]), call.caller.sees).engine
        task = EmbedTask(texts=decoded.texts, timeout=call.remaining())
        call.charge.reserve(sum(estimated_tokens(Prompt(text=text)) for text in decoded.texts))
        with refused_is_free(call.charge):
            found = await engine.embed(task)
        call.charge.prompt_tokens = found.usage.prompt_tokens
        response: inference_pb2.EmbedResponse = to_message(found)
        return response

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: Context,
    ) -> inference_pb2.TokenizeResponse:
        """Return the tokens of a prompt."""
        engine = self._engine(request.model, call_of(context))
        found = [await engine.tokenize((await read(TokenizeRequest, request)).prompt)]
        # Encoding and freeing the tokens of a long text in the event loop would block other calls.
        response: inference_pb2.TokenizeResponse = await asyncio.to_thread(lambda: to_message(found.pop()))
        return response

    async def AttentionMaps(
        self,
        request: inference_pb2.AttentionMapsRequest,
        context: Context,
    ) -> AsyncIterator[inference_pb2.AttentionMapsResponse]:
        """Stream attention weights, one message per layer."""
        call = call_of(context)
        model = require_serving(self._fleet.find(request.model, call.caller.sees))
        decoded = await read(AttentionMapsRequest, request)
        call.charge.reserve(estimated_tokens(decoded.prompt))
        with refused_is_free(call.charge):
            maps = await model.engine.attention_maps(decoded, model.adapter)
        for found in maps:
            yield await asyncio.to_thread(to_message, found)

    async def GetEngineStats(
        self,
        request: inference_pb2.GetEngineStatsRequest,
        context: Context,
    ) -> inference_pb2.GetEngineStatsResponse:
        """Return the engine statistics of a model."""
        engine = self._engine(request.model, call_of(context))
        response: inference_pb2.GetEngineStatsResponse = to_message(await engine.stats())
        return response

    def _size_of(self, request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest, call: Call) -> RequestSize:
        """The size of a request; raises `OutOfCapacity` if a similar one was refused a moment ago.

        With several versions no refusal is checked: which version serves a request is known only after decoding it.
        """
        size = RequestSize.of(request, call.tenant, call.remaining())
        versions = self._fleet.versions(request.model, call.caller.sees)
        if len(versions) == 1:
            versions[0].refusals.check(size)
        return size

    def _engine(self, model: str, call: Call) -> EngineClient:
        return self._fleet.engine(model, call.caller.sees)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Lists, loads, scales and unloads the models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loading: set[tuple[str, str]] = set()
        """Tenants and names of the models that they are loading now."""

    async def ListModels(
        self,
        request: model_pb2.ListModelsRequest,
        context: Context,
    ) -> model_pb2.ListModelsResponse:
        """List the models that the caller may see, sorted by name."""
        page, following = page_of(self._fleet.listed(call_of(context).caller.sees), request)
        return model_pb2.ListModelsResponse(models=map(to_message, page), next_page_token=following)

    async def GetModel(
        self,
        request: model_pb2.GetModelRequest,
        context: Context,
    ) -> model_pb2.GetModelResponse:
        """Return one model."""
        info = self._fleet.described(request.name, call_of(context).caller.sees)
        return model_pb2.GetModelResponse(model=to_message(info))

    async def LoadModel(
        self,
        request: model_pb2.LoadModelRequest,
        context: Context,
    ) -> model_pb2.LoadModelResponse:
        """Load a model and return when it serves: for all tenants if an admin calls, else for the caller's tenant."""
        config = from_message(EngineConfig, request.engine)
        caller = call_of(context).caller
        sees = caller.sees
        deployment = from_message(DeploymentConfig, request.deployment)
        with self._within_limit(caller, request.name):
            model = await self._fleet.load(
                request.name,
                request.source,
                config,
                request.base_model,
                deployment=deployment,
                tenant=sees,
                traffic=request.traffic if request.HasField("traffic") else None,
            )
        if request.replace:
            await self._fleet.replace_others(model.name, sees)
            await self._fleet.publish()
        return model_pb2.LoadModelResponse(model=to_message(model.now()))

    @contextmanager
    def _within_limit(self, caller: Caller, name: str) -> Iterator[None]:
        """Raise `OutOfCapacity` if the caller has as many models as it may; inside, count this one as its own."""
        owner, most = caller.sees, caller.max_models
        if owner is None or most is None:
            yield
            return
        own = self._fleet.owned(owner) | {each for tenant, each in self._loading if tenant == owner}
        if name not in own and len(own) >= most:
            text = f"this tenant has {len(own)} models loaded, its maximum; unload one first"
            raise OutOfCapacity(text, limit="max_models", allowed=f"{most:g}")
        self._loading.add((owner, name))
        try:
            yield
        finally:
            self._loading.discard((owner, name))

    async def ScaleModel(
        self,
        request: model_pb2.ScaleModelRequest,
        context: Context,
    ) -> model_pb2.ScaleModelResponse:
        """Change how many engines serve a model."""
        deployment, sees = from_message(DeploymentConfig, request.deployment), call_of(context).caller.sees
        model = await self._fleet.scale(request.name, deployment, sees)
        return model_pb2.ScaleModelResponse(model=to_message(model.now()))

    async def SetTraffic(
        self,
        request: model_pb2.SetTrafficRequest,
        context: Context,
    ) -> model_pb2.SetTrafficResponse:
        """Divide the requests for a model among its versions."""
        if base_name(request.name) != request.name:
            raise InvalidValue.of("name", request.name, "the name of a model without a version")
        shares = {f"{request.name}@{version}".removesuffix("@"): share for version, share in request.traffic.items()}
        models = self._fleet.set_traffic(request.name, shares, call_of(context).caller.sees)
        await self._fleet.publish()
        return model_pb2.SetTrafficResponse(models=[to_message(model.now()) for model in models])

    async def UnloadModel(
        self,
        request: model_pb2.UnloadModelRequest,
        context: Context,
    ) -> model_pb2.UnloadModelResponse:
        """Take a model out of service."""
        timeout = request.shutdown_timeout if request.HasField("shutdown_timeout") else DEFAULT_SHUTDOWN_TIMEOUT
        if not 0 <= timeout <= MAX_SHUTDOWN_TIMEOUT:
            raise InvalidValue.of("shutdown_timeout", timeout, f"0 to {MAX_SHUTDOWN_TIMEOUT:g}")
        await self._fleet.unload(request.name, timeout, call_of(context).caller.sees)
        return model_pb2.UnloadModelResponse()
