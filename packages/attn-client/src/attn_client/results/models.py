"""What the server says of models and mechanisms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from attn.v1 import catalog_pb2
from attn.v1 import model_pb2 as pb
from google.protobuf.json_format import MessageToDict


class ModelState(StrEnum):
    """Where a model is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, value: pb.ModelState.ValueType) -> ModelState:
        """From the wire; a state newer than this client is unknown."""
        name = pb.ModelState.Name(value).removeprefix("MODEL_STATE_") if value in pb.ModelState.values() else ""
        return cls.__members__.get(name, cls.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on the server; sizes are 0 while it loads."""

    name: str
    source: str
    architecture: str
    mechanisms: tuple[str, ...]
    parameters: int
    context_length: int
    vocabulary_size: int
    layers: int
    heads: int
    dtype: str
    weights: str
    device: str
    chat: bool
    state: ModelState
    state_detail: str
    note: str = ""

    @classmethod
    def of(cls, message: pb.Model) -> Model:
        """From the wire."""
        same = {field.name for field in fields(cls)} - {"mechanisms", "state"}
        return cls(
            **{name: getattr(message, name) for name in same},
            mechanisms=tuple(message.mechanisms),
            state=ModelState.of(message.state),
        )


@dataclass(frozen=True, kw_only=True)
class MechanismOption:
    """An option of a mechanism; `required` when it has no default."""

    name: str
    type: str
    default: Any
    required: bool
    description: str


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism installed on the server."""

    name: str
    distribution: str
    version: str
    summary: str
    paper: str
    equation: str
    capabilities: tuple[str, ...]
    states: tuple[str, ...]
    options: tuple[MechanismOption, ...]

    @classmethod
    def of(cls, message: catalog_pb2.Mechanism) -> Mechanism:
        """From the wire."""
        kinds = [catalog_pb2.StateKind.Name(kind) for kind in message.state_kinds]
        paper = message.paper
        return cls(
            name=f"{message.distribution}/{message.name}" if message.ambiguous else message.name,
            distribution=message.distribution,
            version=message.version,
            summary=message.summary,
            paper=f"{paper.authors} ({paper.year}). {paper.title}." if paper.title else "",
            equation=message.equation,
            capabilities=tuple(message.capabilities),
            states=tuple(kind.removeprefix("STATE_KIND_").lower() for kind in kinds),
            options=tuple(map(_option, message.options)),
        )


def _option(message: catalog_pb2.MechanismOption) -> MechanismOption:
    given = message.HasField("default_value")
    return MechanismOption(
        name=message.name,
        type=message.type,
        default=MessageToDict(message.default_value) if given else None,
        required=not given,
        description=message.description,
    )
