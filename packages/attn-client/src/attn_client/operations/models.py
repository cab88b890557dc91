"""Models and mechanisms of the server."""

from __future__ import annotations

from attn.v1 import catalog_pb2
from attn.v1 import model_pb2 as pb

from attn_client.operations import Operation, Page, nothing
from attn_client.results.models import Mechanism, Model

SERVICE = "/attn.v1.ModelService"
CATALOG = "/attn.v1.CatalogService"


def list_models(token: str) -> Operation[pb.ListModelsResponse, Page[Model]]:
    """A page of models."""
    request = pb.ListModelsRequest(page_token=token)

    def page(answer: pb.ListModelsResponse) -> Page[Model]:
        return Page([*map(Model.of, answer.models)], answer.next_page_token)

    return Operation(f"{SERVICE}/ListModels", request, pb.ListModelsResponse, page)


def get_model(name: str) -> Operation[pb.GetModelResponse, Model]:
    """One model."""
    request = pb.GetModelRequest(name=name)
    return Operation(f"{SERVICE}/GetModel", request, pb.GetModelResponse, lambda answer: Model.of(answer.model))


def load_model(name: str, source: str, engine: pb.EngineOptions | None) -> Operation[pb.LoadModelResponse, Model]:
    """Load a model."""
    request = pb.LoadModelRequest(name=name, source=source, engine=engine)
    return Operation(f"{SERVICE}/LoadModel", request, pb.LoadModelResponse, lambda answer: Model.of(answer.model))


def unload_model(name: str, grace_seconds: float | None) -> Operation[pb.UnloadModelResponse, None]:
    """Take a model out of service."""
    request = pb.UnloadModelRequest(name=name, grace_seconds=grace_seconds)
    return Operation(f"{SERVICE}/UnloadModel", request, pb.UnloadModelResponse, nothing)


def list_mechanisms(token: str) -> Operation[catalog_pb2.ListMechanismsResponse, Page[Mechanism]]:
    """A page of mechanisms."""
    request = catalog_pb2.ListMechanismsRequest(page_token=token)

    def page(answer: catalog_pb2.ListMechanismsResponse) -> Page[Mechanism]:
        return Page([*map(Mechanism.of, answer.mechanisms)], answer.next_page_token)

    return Operation(f"{CATALOG}/ListMechanisms", request, catalog_pb2.ListMechanismsResponse, page)


def get_mechanism(name: str) -> Operation[catalog_pb2.GetMechanismResponse, Mechanism]:
    """One mechanism."""
    return Operation(
        f"{CATALOG}/GetMechanism",
        catalog_pb2.GetMechanismRequest(name=name),
        catalog_pb2.GetMechanismResponse,
        lambda answer: Mechanism.of(answer.mechanism),
    )
