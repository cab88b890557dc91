"""The models a server has loaded."""

from __future__ import annotations

from attn.v1 import model_pb2 as wire
from attn.v1 import model_pb2_grpc
from attn_core.errors import InvalidValue
from attn_gateway import Context, page_of

from attn_serve.convert import settings_of
from attn_serve.fleet import Fleet, ServedModel, ServedState

STATES = {
    ServedState.LOADING: wire.MODEL_STATE_LOADING,
    ServedState.SERVING: wire.MODEL_STATE_SERVING,
    ServedState.DRAINING: wire.MODEL_STATE_DRAINING,
    ServedState.FAILED: wire.MODEL_STATE_FAILED,
}
DEFAULT_GRACE_SECONDS = 30.0
LONGEST_GRACE_SECONDS = 3600.0


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Loads and unloads models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def ListModels(self, request: wire.ListModelsRequest, context: Context) -> wire.ListModelsResponse:  # noqa: N802, ARG002
        """List models by name."""
        page, following = page_of(self._fleet.models(), request)
        return wire.ListModelsResponse(models=[model_message(model) for model in page], next_page_token=following)

    async def GetModel(self, request: wire.GetModelRequest, context: Context) -> wire.GetModelResponse:  # noqa: N802, ARG002
        """Return one model."""
        return wire.GetModelResponse(model=model_message(self._fleet.find(request.name)))

    async def LoadModel(self, request: wire.LoadModelRequest, context: Context) -> wire.LoadModelResponse:  # noqa: N802, ARG002
        """Load a model and return when it answers."""
        model = await self._fleet.load(request.name, request.source, settings_of(request.engine))
        return wire.LoadModelResponse(model=model_message(model))

    async def UnloadModel(self, request: wire.UnloadModelRequest, context: Context) -> wire.UnloadModelResponse:  # noqa: N802, ARG002
        """Take a model out of service."""
        grace = request.grace_seconds if request.HasField("grace_seconds") else DEFAULT_GRACE_SECONDS
        if not 0 <= grace <= LONGEST_GRACE_SECONDS:
            raise InvalidValue.of("grace_seconds", grace, f"0 to {LONGEST_GRACE_SECONDS:g}")
        await self._fleet.unload(request.name, grace)
        return wire.UnloadModelResponse()


def model_message(model: ServedModel) -> wire.Model:
    """A model on the wire; what is known of it only after loading is left out before."""
    message = wire.Model(name=model.name, source=model.source, state=STATES[model.state], state_detail=model.detail)
    message.load_time.FromDatetime(model.since)
    info = model.info
    if info is not None:
        message.architecture = info.architecture
        message.mechanisms.extend(info.mechanisms)
        message.parameters = info.parameters
        message.context_length = info.context
        message.vocabulary_size = info.vocabulary
        message.layers = info.layers
        message.heads = info.heads
        message.dtype = info.dtype
        message.weights = info.weights
        message.device = info.device
        message.chat = info.chat
        message.note = info.note
    return message
