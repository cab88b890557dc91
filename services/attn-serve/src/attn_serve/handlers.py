"""The handlers of the calls about models: inference, and loading, scaling and unloading models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_engine.client import EmbedTask, TextTask
from attn_gateway import Call, page_of
from attn_gateway.call import Caller
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EmbedRequest,
    EngineStats,
    GenerateRequest,
    ModelState,
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
    SleepRequest,
    SleepResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WakeUpRequest,
    WakeUpResponse,
)

from attn_serve.refusals import RequestSize, estimated_tokens, most_new_tokens
from attn_serve.served_models import ServedModel, ServedModels

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


def checked_timeout(given: float | None) -> float:
    """The seconds in which running requests may end, by default 30; raises `InvalidValue`."""
    timeout = DEFAULT_SHUTDOWN_TIMEOUT if given is None else given
    if not 0 <= timeout <= MAX_SHUTDOWN_TIMEOUT:
        raise InvalidValue.of("shutdown_timeout", timeout, f"0 to {MAX_SHUTDOWN_TIMEOUT:g}")
    return timeout


class InferenceHandlers:
    """Runs inference requests on the served models; a request is cancelled when its client disconnects."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served

    async def generate(self, request: GenerateRequest, call: Call) -> AsyncIterator[OutputDelta]:
        """Stream the completions of a prompt."""
        model = self._serving(request.model, call)
        task = text_task(request.prompt, request.sampling, call, model.adapter, request.resume)
        most = most_new_tokens(request.sampling)
        size = await RequestSize.of(call, (request.prompt,), most, resumed=request.resume is not None)
        with model.refusals.apply(size):
            call.charge.reserve(size.prompt_tokens, most)
            # Beams show their tokens only at the end: who hangs up before pays for all.
            shown = request.sampling.num_beams == 1
            call.charge.new_tokens = 0 if shown else most
            async with aclosing(model.engine.generate(task)) as deltas:
                async for delta in deltas:
                    call.charge.new_tokens += len(delta.tokens) if shown else 0
                    if delta.usage:
                        call.charge.prompt_tokens = delta.usage.prompt_tokens
                        call.charge.new_tokens = delta.usage.completion_tokens
                    yield delta

    async def score(self, request: ScoreRequest, call: Call) -> ScoreResponse:
        """Return the log probabilities of given sequences."""
        model = self._serving(request.model, call)
        params = ScoringParams(top_logprobs=request.top_logprobs)
        size = await RequestSize.of(call, request.prompts, 0)
        with model.refusals.apply(size):
            call.charge.reserve(size.prompt_tokens)
            tasks = [text_task(prompt, params, call, model.adapter) for prompt in request.prompts]
            scores = await model.engine.score(tasks)
        usage = Usage(prompt_tokens=sum(len(score.tokens) for score in scores))
        call.charge.prompt_tokens = usage.prompt_tokens
        return ScoreResponse(scores=tuple(scores), usage=usage)

    async def embed(self, request: EmbedRequest, call: Call) -> Embeddings:
        """Return the embeddings of texts."""
        engine = self._serving(request.model, call).engine
        ids = tuple(text.ids for text in request.token_ids)
        texts: tuple[str | tuple[int, ...], ...] = request.texts or ids
        call.charge.reserve(sum(estimated_tokens(Prompt.of(text)) for text in texts))
        found = await engine.embed(EmbedTask(texts=texts, timeout=call.remaining(), max_tokens=request.max_tokens))
        call.charge.prompt_tokens = found.usage.prompt_tokens
        return found

    async def tokenize(self, request: TokenizeRequest, call: Call) -> Tokenization:
        """Return the tokens of a prompt."""
        return await self._serving(request.model, call).engine.tokenize(request.prompt)

    async def attention_maps(self, request: AttentionMapsRequest, call: Call) -> AsyncIterator[AttentionMap]:
        """Stream attention weights, one map for each layer."""
        model = self._serving(request.model, call)
        call.charge.reserve(estimated_tokens(request.prompt))
        for found in await model.engine.attention_maps(request, model.adapter):
            yield found

    async def get_engine_stats(self, request: GetEngineStatsRequest, call: Call) -> EngineStats:
        """Return the engine statistics of a model."""
        return await self._serving(request.model, call).engine.stats()

    def _serving(self, model: str, call: Call) -> ServedModel:
        return self._served.serving(model, call.caller.sees)


class ModelHandlers:
    """Lists, loads, scales and unloads models."""

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._loading: set[tuple[str, str]] = set()
        """Tenants and names of the models that they are loading now."""

    async def list_models(self, request: ListModelsRequest, call: Call) -> ListModelsResponse:
        """List the models that the caller may see, sorted by name."""
        page, following = page_of(self._served.listed(call.caller.sees), request)
        local = await self._served.local_names(call.caller.sees) if request.with_local else ()
        return ListModelsResponse(models=tuple(page), next_page_token=following, local_models=tuple(local))

    async def get_model(self, request: GetModelRequest, call: Call) -> GetModelResponse:
        """Return one model."""
        info = self._served.described(request.name, call.caller.sees)
        return GetModelResponse(model=info)

    async def load_model(self, request: LoadModelRequest, call: Call) -> LoadModelResponse:
        """Load a model and return when it serves: for all tenants if an admin calls, else for the caller's tenant."""
        with self._within_limit(call.caller, request.name):
            model = await self._served.load(
                request.name,
                request.source,
                request.engine,
                request.base_model,
                deployment=request.deployment,
                tenant=call.caller.sees,
                max_memory_bytes=call.caller.max_memory_bytes,
            )
        return LoadModelResponse(model=model.now())

    @contextmanager
    def _within_limit(self, caller: Caller, name: str) -> Iterator[None]:
        """Raise `OutOfCapacity` if the caller has as many models as it may; inside, count this one as its own."""
        owner, most = caller.sees, caller.max_models
        if owner is None or most is None:
            yield
            return
        own = self._served.owned(owner) | {each for tenant, each in self._loading if tenant == owner}
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
        caller = call.caller
        model = await self._served.scale(
            request.name, request.deployment, caller.sees, max_memory_bytes=caller.max_memory_bytes
        )
        return ScaleModelResponse(model=model.now())

    async def sleep(self, request: SleepRequest, call: Call) -> SleepResponse:
        """Free a model's memory until it is woken up."""
        call.caller.require_admin("sleep")
        timeout = checked_timeout(request.shutdown_timeout)
        model = await self._served.switch(request.name, lambda engine: engine.sleep(timeout), ModelState.SLEEPING)
        return SleepResponse(model=model.now())

    async def wake_up(self, request: WakeUpRequest, call: Call) -> WakeUpResponse:
        """Load a sleeping model again."""
        call.caller.require_admin("wake_up")
        model = await self._served.switch(request.name, lambda engine: engine.wake_up(), ModelState.SERVING)
        return WakeUpResponse(model=model.now())

    async def update_weights(self, request: UpdateWeightsRequest, call: Call) -> UpdateWeightsResponse:
        """Take a part of a safetensors file, whose weights replace the model's after the last part."""
        call.caller.require_admin("update_weights")
        part = request.data, request.offset, checked_timeout(request.shutdown_timeout)
        model = await self._served.switch(request.name, lambda engine: engine.update_weights(*part, last=request.last))
        return UpdateWeightsResponse(model=model.now())

    async def unload_model(self, request: UnloadModelRequest, call: Call) -> UnloadModelResponse:
        """Take a model out of service."""
        await self._served.unload(request.name, checked_timeout(request.shutdown_timeout), call.caller.sees)
        return UnloadModelResponse()
