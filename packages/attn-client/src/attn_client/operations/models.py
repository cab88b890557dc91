"""Calls of the model service and the mechanism catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from attn.v1 import catalog_pb2
from attn.v1 import model_pb2 as pb
from attn_schema import DeploymentConfig, EngineConfig, Mechanism, ModelInfo
from attn_schema.codec import from_message, require_wire, to_message

from attn_client.operations import Operation, Page, nothing

SERVICE = "/attn.v1.ModelService"
CATALOG = "/attn.v1.CatalogService"


def list_models(token: str) -> Operation[pb.ListModelsResponse, Page[ModelInfo]]:
    """List models, one page for each call."""
    request = pb.ListModelsRequest(page_token=token)

    def page(answer: pb.ListModelsResponse) -> Page[ModelInfo]:
        return Page([from_message(ModelInfo, model) for model in answer.models], answer.next_page_token)

    return Operation(f"{SERVICE}/ListModels", request, pb.ListModelsResponse, page)


def _model(answer: pb.GetModelResponse | pb.LoadModelResponse | pb.ScaleModelResponse) -> ModelInfo:
    return from_message(ModelInfo, answer.model)


def get_model(name: str) -> Operation[pb.GetModelResponse, ModelInfo]:
    """Get one model."""
    request = pb.GetModelRequest(name=name)
    return Operation(f"{SERVICE}/GetModel", request, pb.GetModelResponse, _model)


def load_model(
    name: str,
    source: str,
    engine: EngineConfig | None,
    base_model: str = "",
    deployment: DeploymentConfig | None = None,
    traffic: float | None = None,
    *,
    replace: bool = False,
) -> Operation[pb.LoadModelResponse, ModelInfo]:
    """Load a model, a version of a model, or an adapter on a model.

    Raises `InvalidValue` for engine settings that the protobuf message does not carry, such as `num_threads`.
    """
    for settings in (engine, deployment):
        if settings is not None:
            require_wire(settings)
    request = pb.LoadModelRequest(
        name=name,
        source=source,
        engine=None if engine is None else to_message(engine),
        base_model=base_model,
        deployment=None if deployment is None else to_message(deployment),
        traffic=traffic,
        replace=replace,
    )
    return Operation(f"{SERVICE}/LoadModel", request, pb.LoadModelResponse, _model)


def scale_model(name: str, deployment: DeploymentConfig) -> Operation[pb.ScaleModelResponse, ModelInfo]:
    """Change the number of engines that serve a model."""
    request = pb.ScaleModelRequest(name=name, deployment=to_message(deployment))
    return Operation(f"{SERVICE}/ScaleModel", request, pb.ScaleModelResponse, _model)


def set_traffic(name: str, shares: Mapping[str, float]) -> Operation[pb.SetTrafficResponse, list[ModelInfo]]:
    """Divide the requests for a model among its versions."""
    request = pb.SetTrafficRequest(name=name, traffic=shares)

    def models(answer: pb.SetTrafficResponse) -> list[ModelInfo]:
        return [from_message(ModelInfo, model) for model in answer.models]

    return Operation(f"{SERVICE}/SetTraffic", request, pb.SetTrafficResponse, models)


def unload_model(name: str, shutdown_timeout: float | None) -> Operation[pb.UnloadModelResponse, None]:
    """Unload a model."""
    request = pb.UnloadModelRequest(name=name, shutdown_timeout=shutdown_timeout)
    return Operation(f"{SERVICE}/UnloadModel", request, pb.UnloadModelResponse, nothing)


def list_mechanisms(token: str) -> Operation[catalog_pb2.ListMechanismsResponse, Page[Mechanism]]:
    """List mechanisms, one page for each call."""
    request = catalog_pb2.ListMechanismsRequest(page_token=token)

    def page(answer: catalog_pb2.ListMechanismsResponse) -> Page[Mechanism]:
        return Page([from_message(Mechanism, item) for item in answer.mechanisms], answer.next_page_token)

    return Operation(f"{CATALOG}/ListMechanisms", request, catalog_pb2.ListMechanismsResponse, page)


def get_mechanism(name: str) -> Operation[catalog_pb2.GetMechanismResponse, Mechanism]:
    """Get one mechanism."""
    return Operation(
        f"{CATALOG}/GetMechanism",
        catalog_pb2.GetMechanismRequest(name=name),
        catalog_pb2.GetMechanismResponse,
        lambda answer: from_message(Mechanism, answer.mechanism),
    )
