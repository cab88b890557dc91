"""Calls of the model service and the mechanism catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema import DeploymentConfig, EngineConfig, Mechanism, ModelInfo
from attn_schema import methods as rows
from attn_schema.codec import require_wire

from attn_client.operations import Operation, Page, nothing


def list_models(token: str) -> Operation[Page[ModelInfo]]:
    """List models, one page for each call."""

    def page(answer: rows.ListModelsResponse) -> Page[ModelInfo]:
        return Page(answer.models, answer.next_page_token)

    return Operation(rows.LIST_MODELS, rows.ListModelsRequest(page_token=token), page)


def _model(answer: Any) -> ModelInfo:
    model: ModelInfo = answer.model
    return model


def get_model(name: str) -> Operation[ModelInfo]:
    """Get one model."""
    return Operation(rows.GET_MODEL, rows.GetModelRequest(name=name), _model)


def load_model(
    name: str,
    source: str,
    engine: EngineConfig | None,
    base_model: str = "",
    deployment: DeploymentConfig | None = None,
    traffic: float | None = None,
    *,
    replace: bool = False,
) -> Operation[ModelInfo]:
    """Load a model, a version of a model, or an adapter on a model.

    Raises `InvalidValue` for engine settings that the protobuf message does not carry, such as `num_threads`.
    """
    engine, deployment = engine or EngineConfig(), deployment or DeploymentConfig()
    for settings in (engine, deployment):
        require_wire(settings)
    request = rows.LoadModelRequest(
        name=name,
        source=source,
        engine=engine,
        base_model=base_model,
        deployment=deployment,
        traffic=traffic,
        replace=replace,
    )
    return Operation(rows.LOAD_MODEL, request, _model)


def scale_model(name: str, deployment: DeploymentConfig) -> Operation[ModelInfo]:
    """Change the number of engines that serve a model."""
    return Operation(rows.SCALE_MODEL, rows.ScaleModelRequest(name=name, deployment=deployment), _model)


def set_traffic(name: str, shares: Mapping[str, float]) -> Operation[list[ModelInfo]]:
    """Divide the requests for a model among its versions."""

    def models(answer: rows.SetTrafficResponse) -> list[ModelInfo]:
        return list(answer.models)

    return Operation(rows.SET_TRAFFIC, rows.SetTrafficRequest(name=name, traffic=dict(shares)), models)


def unload_model(name: str, shutdown_timeout: float | None) -> Operation[None]:
    """Unload a model."""
    request = rows.UnloadModelRequest(name=name, shutdown_timeout=shutdown_timeout)
    return Operation(rows.UNLOAD_MODEL, request, nothing)


def list_mechanisms(token: str) -> Operation[Page[Mechanism]]:
    """List mechanisms, one page for each call."""

    def page(answer: rows.ListMechanismsResponse) -> Page[Mechanism]:
        return Page(answer.mechanisms, answer.next_page_token)

    return Operation(rows.LIST_MECHANISMS, rows.ListMechanismsRequest(page_token=token), page)


def get_mechanism(name: str) -> Operation[Mechanism]:
    """Get one mechanism."""

    def found(answer: rows.GetMechanismResponse) -> Mechanism:
        return answer.mechanism

    return Operation(rows.GET_MECHANISM, rows.GetMechanismRequest(name=name), found)
