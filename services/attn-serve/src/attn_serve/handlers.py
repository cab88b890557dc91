"""The handlers of the calls about models: inference, and loading, scaling and unloading models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_engine.client import EngineClient
from attn_engine.host import EmbedTask, TextTask
from attn_gateway import Call, page_of
from attn_gateway.call import Caller
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EmbedRequest,
    EngineStats,
    GenerateRequest,
    OutputDelta,
    Prompt,
    Resumption,
    SamplingParams,
    ScoreRequest,
    ScoringParams,
    Tokenization,
    TokenizeRequest,
    Usage,
)
from attn_schema.methods import (
    GetEngineStatsRequest,
    GetModelRequest,
    GetModelResponse,
    ListModelsRequest,
    ListModelsResponse,
    LoadModelRequest,
    LoadModelResponse,
    ScaleModelRequest,
    ScaleModelResponse,
    ScoreResponse,
    SetTrafficRequest,
    SetTrafficResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)

from attn_serve.fleet import Fleet
from attn_serve.refusals import RequestSize, estimated_tokens, most_new_tokens
from attn_serve.served_model import require_serving
from attn_serve.sources import MOST_BYTES
from attn_serve.versions import base_name

DEFAULT_SHUTDOWN_TIMEOUT = 30.0
MAX_SHUTDOWN_TIMEOUT = 3600.0


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


class InferenceHandlers:
    """Runs inference requests on the models of a fleet; a request is cancelled when its client disconnects."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def generate(self, request: GenerateRequest, call: Call) -> AsyncIterator[OutputDelta]:
        """Stream the completions of a prompt."""
        first_version = request.resume.model if request.resume else ""
        if first_version and base_name(first_version) != base_name(request.model):
            raise InvalidValue.of("resume.model", first_version, f"a version of {request.model!r}")
        model = self._fleet.choose(first_version or request.model, request.prompt, call.caller.sees)
        served_name = "" if model.name == request.model else model.name
        task = text_task(request.prompt, request.sampling, call, model.adapter, request.resume)
        most = most_new_tokens(request.sampling)
        size = RequestSize.of(call, (request.prompt,), most, resumed=request.resume is not None)
        with model.refusals.apply(size):
            call.charge.reserve(estimated_tokens(request.prompt), most)
            # Beams show their tokens only at the end: who hangs up before pays for all.
            shown = request.sampling.num_beams == 1
            call.charge.new_tokens = 0 if shown else most
            async with aclosing(model.engine.generate(task)) as deltas:
                async for delta in deltas:
                    call.charge.new_tokens += len(delta.tokens) if shown else 0
                    if delta.usage:
                        call.charge.prompt_tokens = delta.usage.prompt_tokens
                        call.charge.new_tokens = delta.usage.completion_tokens
                    yield delta.replace(model=served_name) if served_name else delta
                    served_name = ""

    async def score(self, request: ScoreRequest, call: Call) -> ScoreResponse:
        """Return the log probabilities of given sequences."""
        model = self._fleet.choose(request.model, request.prompts[0], call.caller.sees)
        params = ScoringParams(top_logprobs=request.top_logprobs)
        with model.refusals.apply(RequestSize.of(call, request.prompts, 0)):
            call.charge.reserve(sum(map(estimated_tokens, request.prompts)))
            tasks = [text_task(prompt, params, call, model.adapter) for prompt in request.prompts]
            scores = await model.engine.score(tasks)
        usage = Usage(prompt_tokens=sum(len(score.tokens) for score in scores))
        call.charge.prompt_tokens = usage.prompt_tokens
        return ScoreResponse(scores=tuple(scores), usage=usage)

    async def embed(self, request: EmbedRequest, call: Call) -> Embeddings:
        """Return the embeddings of texts."""
        engine = self._fleet.choose(request.model, Prompt(text=request.texts[0]), call.caller.sees).engine
        call.charge.reserve(sum(estimated_tokens(Prompt(text=text)) for text in request.texts))
        found = await engine.embed(EmbedTask(texts=request.texts, timeout=call.remaining()))
        call.charge.prompt_tokens = found.usage.prompt_tokens
        return found

    async def tokenize(self, request: TokenizeRequest, call: Call) -> Tokenization:
        """Return the tokens of a prompt."""
        return await self._engine(request.model, call).tokenize(request.prompt)

    async def attention_maps(self, request: AttentionMapsRequest, call: Call) -> AsyncIterator[AttentionMap]:
        """Stream attention weights, one map for each layer."""
        model = require_serving(self._fleet.find(request.model, call.caller.sees))
        call.charge.reserve(estimated_tokens(request.prompt))
        for found in await model.engine.attention_maps(request, model.adapter):
            yield found

    async def get_engine_stats(self, request: GetEngineStatsRequest, call: Call) -> EngineStats:
        """Return the engine statistics of a model."""
        return await self._engine(request.model, call).stats()

    def _engine(self, model: str, call: Call) -> EngineClient:
        return self._fleet.engine(model, call.caller.sees)


class ModelHandlers:
    """Lists, loads, scales and unloads the models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loading: set[tuple[str, str]] = set()
        """Tenants and names of the models that they are loading now."""

    async def list_models(self, request: ListModelsRequest, call: Call) -> ListModelsResponse:
        """List the models that the caller may see, sorted by name."""
        page, following = page_of(self._fleet.listed(call.caller.sees), request)
        return ListModelsResponse(models=tuple(page), next_page_token=following)

    async def get_model(self, request: GetModelRequest, call: Call) -> GetModelResponse:
        """Return one model."""
        info = self._fleet.described(request.name, call.caller.sees)
        return GetModelResponse(model=info)

    async def load_model(self, request: LoadModelRequest, call: Call) -> LoadModelResponse:
        """Load a model and return when it serves: for all tenants if an admin calls, else for the caller's tenant."""
        sees = call.caller.sees
        MOST_BYTES.set(call.caller.max_memory_bytes)
        with self._within_limit(call.caller, request.name):
            model = await self._fleet.load(
                request.name,
                request.source,
                request.engine,
                request.base_model,
                deployment=request.deployment,
                tenant=sees,
                traffic=request.traffic,
            )
        if request.replace:
            await self._fleet.replace_others(model.name, sees)
            await self._fleet.publish()
        return LoadModelResponse(model=model.now())

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

    async def scale_model(self, request: ScaleModelRequest, call: Call) -> ScaleModelResponse:
        """Change how many engines serve a model."""
        MOST_BYTES.set(call.caller.max_memory_bytes)
        model = await self._fleet.scale(request.name, request.deployment, call.caller.sees)
        return ScaleModelResponse(model=model.now())

    async def set_traffic(self, request: SetTrafficRequest, call: Call) -> SetTrafficResponse:
        """Divide the requests for a model among its versions."""
        if base_name(request.name) != request.name:
            raise InvalidValue.of("name", request.name, "the name of a model without a version")
        shares = {f"{request.name}@{version}".removesuffix("@"): share for version, share in request.traffic.items()}
        models = self._fleet.set_traffic(request.name, shares, call.caller.sees)
        await self._fleet.publish()
        return SetTrafficResponse(models=tuple(model.now() for model in models))

    async def unload_model(self, request: UnloadModelRequest, call: Call) -> UnloadModelResponse:
        """Take a model out of service."""
        timeout = DEFAULT_SHUTDOWN_TIMEOUT if request.shutdown_timeout is None else request.shutdown_timeout
        if not 0 <= timeout <= MAX_SHUTDOWN_TIMEOUT:
            raise InvalidValue.of("shutdown_timeout", timeout, f"0 to {MAX_SHUTDOWN_TIMEOUT:g}")
        await self._fleet.unload(request.name, timeout, call.caller.sees)
        return UnloadModelResponse()
