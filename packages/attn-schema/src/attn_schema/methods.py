"""The calls of attn as rows: service, name, request, response. Servers, clients, JSON and gRPC follow from them.

Requests and responses that only calls have are declared here too; all others are nouns of other modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from attn_schema.catalog import BrokenPlugin, Mechanism, ModelInfo
from attn_schema.deployment import DeploymentConfig
from attn_schema.engine import EngineConfig, EngineStats
from attn_schema.estimate import JobEstimate
from attn_schema.inference import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    OutputDelta,
    ScoreRequest,
    SequenceScore,
    Tokenization,
    TokenizeRequest,
    Usage,
)
from attn_schema.schema import Schema
from attn_schema.training import JobEvent, TrainingConfig, TrainingJob

INFERENCE, MODELS, CATALOG, TRAINING = (
    f"attn.v1.{name}Service" for name in ("Inference", "Model", "Catalog", "Training")
)
"""The full names of the services."""

Name = Annotated[str, Meta(description="Name of the model.")]
JobId = Annotated[str, Meta(description="Id of the job.")]
PageSize = Annotated[int, Meta(description="Maximum number of items, at most 1000; 0 for 100.")]
PageToken = Annotated[str, Meta(description="The next_page_token of the previous page; empty for the first page.")]
NextPage = Annotated[str, Meta(description="Token of the next page; empty on the last page.")]


Request = TypeVar("Request", bound=msgspec.Struct)
Response = TypeVar("Response", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True, eq=False)
class Method(Generic[Request, Response]):
    """One call: the types of its request and response, and what servers and clients must know of it.

    `streams` is whether it returns any number of responses, `repeatable` whether it may safely be sent twice, `changes`
    whether it is audited, and `bulk` whether a short request may have a response so large that encoding it would block
    other calls.
    """

    service: str
    name: str
    request: type[Request]
    response: type[Response]
    streams: bool = False
    repeatable: bool = True
    changes: bool = False
    bulk: bool = False

    @property
    def path(self) -> str:
        """The full name, such as "/attn.v1.ModelService/ListModels": its path over gRPC and HTTP."""
        return f"/{self.service}/{self.name}"

    @property
    def function(self) -> str:
        """The name of its handler, such as "list_models"."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


Row: TypeAlias = Method[Any, Any]
"""Any call."""


class ScoreResponse(Schema, frozen=True, kw_only=True):
    """The log probabilities of the sequences of a request."""

    scores: Annotated[tuple[SequenceScore, ...], Meta(description="One for each prompt, in their order.")]
    usage: Annotated[Usage, Meta(description="Tokens of all sequences.")]


class GetEngineStatsRequest(Schema, frozen=True, kw_only=True):
    """A request for the load and counters of a model's engine."""

    model: Name = ""


class ListModelsRequest(Schema, frozen=True, kw_only=True):
    """A request for a page of models."""

    page_size: PageSize = 0
    page_token: PageToken = ""
    with_local: Annotated[bool, Meta(description="Whether to name the models in the server's home, too.")] = False


class ListModelsResponse(Schema, frozen=True, kw_only=True):
    """A page of models, sorted by name."""

    models: Annotated[tuple[ModelInfo, ...], Meta(description="The models.")] = ()
    next_page_token: NextPage = ""
    local_models: Annotated[
        tuple[str, ...], Meta(description="With with_local, names in the server's home that the caller may load.")
    ] = ()  # fmt: skip


class GetModelRequest(Schema, frozen=True, kw_only=True):
    """A request for one model."""

    name: Name = ""


class GetModelResponse(Schema, frozen=True, kw_only=True):
    """One model."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


class LoadModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to load a model, or an adapter on a model."""

    name: Name = ""
    source: Annotated[str, Meta(description="What to load: a folder, a registered name or a training job.")] = ""
    engine: Annotated[EngineConfig, Meta(description="Engine options.")] = EngineConfig()
    base_model: Annotated[str, Meta(description="For an adapter, the loaded model that it is applied to.")] = ""
    deployment: Annotated[DeploymentConfig, Meta(description="Number of engines.")] = DeploymentConfig()


class LoadModelResponse(Schema, frozen=True, kw_only=True):
    """The model that was loaded."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


class UnloadModelRequest(Schema, frozen=True, kw_only=True):
    """A request to take a model out of service."""

    name: Name = ""
    shutdown_timeout: Annotated[float, Meta(description="Seconds in which running requests may end.")] | None = None


class UnloadModelResponse(Schema, frozen=True, kw_only=True):
    """Nothing: the model is unloaded."""


ShutdownTimeout = Annotated[float, Meta(description="Seconds in which running requests may end; 0 aborts them.")] | None


class SleepRequest(Schema, frozen=True, kw_only=True):
    """A request to free a model's memory until it is woken up."""

    name: Name = ""
    shutdown_timeout: ShutdownTimeout = None


class SleepResponse(Schema, frozen=True, kw_only=True):
    """The model, which sleeps."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


class WakeUpRequest(Schema, frozen=True, kw_only=True):
    """A request to load a sleeping model again."""

    name: Name = ""


class WakeUpResponse(Schema, frozen=True, kw_only=True):
    """The model, which serves again."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


PART_BYTES = 2 * 2**20
"""Bytes of a file of weights in a message, fewer than the 4 MiB that gRPC accepts by default."""


class UpdateWeightsRequest(Schema, frozen=True, kw_only=True):
    """A part of a safetensors file with the weights that replace those of a model, in the layout of its folder."""

    name: Name = ""
    data: Annotated[bytes, Meta(description="Bytes of the file.")] = b""
    offset: Annotated[int, Meta(description="Place of the bytes in the file; 0 begins a new one.")] = 0
    last: Annotated[bool, Meta(description="Whether the file is whole: the weights are checked and replaced.")] = False
    shutdown_timeout: ShutdownTimeout = None


class UpdateWeightsResponse(Schema, frozen=True, kw_only=True):
    """The model, with its new weights after the last part."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


class ScaleModelRequest(Schema, frozen=True, kw_only=True):
    """A request to change how many engines serve a model."""

    name: Name = ""
    deployment: Annotated[DeploymentConfig, Meta(description="Number of engines.")] = DeploymentConfig()


class ScaleModelResponse(Schema, frozen=True, kw_only=True):
    """The model that was scaled."""

    model: Annotated[ModelInfo, Meta(description="The model.")] = ModelInfo()


class ListMechanismsRequest(Schema, frozen=True, kw_only=True):
    """A request for a page of mechanisms."""

    page_size: PageSize = 0
    page_token: PageToken = ""


class ListMechanismsResponse(Schema, frozen=True, kw_only=True):
    """A page of mechanisms, sorted by name."""

    mechanisms: Annotated[tuple[Mechanism, ...], Meta(description="The mechanisms.")] = ()
    next_page_token: NextPage = ""
    broken_plugins: Annotated[
        tuple[BrokenPlugin, ...], Meta(description="Plugins that cannot be used; only on the first page.")
    ] = ()  # fmt: skip


class GetMechanismRequest(Schema, frozen=True, kw_only=True):
    """A request for one mechanism."""

    name: Annotated[str, Meta(description="Short or full name.")] = ""


class GetMechanismResponse(Schema, frozen=True, kw_only=True):
    """One mechanism."""

    mechanism: Annotated[Mechanism, Meta(description="The mechanism.")]


class SubmitTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request to train a model."""

    job_id: Annotated[str, Meta(description="Id of the job; chosen by the server if empty.")] = ""
    config: Annotated[TrainingConfig, Meta(description="The configuration.")] = TrainingConfig()
    validate_only: Annotated[bool, Meta(description="Only check the configuration.")] = False
    priority: Annotated[int, Meta(description="-100 to 100; above 0 for admins.")] = 0


class SubmitTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """The job that was submitted."""

    job: Annotated[TrainingJob, Meta(description="The job.")] = TrainingJob()


class EstimateTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request for the time, memory and disk space of a job that is not submitted."""

    job_id: Annotated[str, Meta(description="Id that the job would have; may be empty.")] = ""
    config: Annotated[TrainingConfig, Meta(description="The configuration.")] = TrainingConfig()


class EstimateTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """The estimate of a job."""

    config: Annotated[TrainingConfig, Meta(description="The configuration with the server's choices.")]
    estimate: Annotated[JobEstimate, Meta(description="The estimate.")] = JobEstimate()


class GetTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request for one job."""

    id: JobId = ""


class GetTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """One job."""

    job: Annotated[TrainingJob, Meta(description="The job.")] = TrainingJob()


class ListTrainingJobsRequest(Schema, frozen=True, kw_only=True):
    """A request for a page of jobs."""

    page_size: PageSize = 0
    page_token: PageToken = ""


class ListTrainingJobsResponse(Schema, frozen=True, kw_only=True):
    """A page of jobs, newest first."""

    jobs: Annotated[tuple[TrainingJob, ...], Meta(description="The jobs.")] = ()
    next_page_token: NextPage = ""


class WatchTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request to follow a job until it has ended."""

    id: JobId = ""
    after_event_id: Annotated[int, Meta(description="Only events after this one are sent; 0 for all.")] = 0


class Heartbeat(Schema, frozen=True, kw_only=True):
    """A sign that the server lives although a job has no new events."""

    last_event_id: Annotated[int, Meta(description="Id of the newest event.")] = 0


class WatchTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """One of: the job at the start, one of its events, a heartbeat."""

    job: Annotated[TrainingJob, Meta(description="The job, in the first message.")] | None = None
    event: Annotated[JobEvent, Meta(description="A new event.")] | None = None
    heartbeat: Annotated[Heartbeat, Meta(description="Nothing is new.")] | None = None


class CancelTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request to stop a job."""

    id: JobId = ""
    discard: Annotated[bool, Meta(description="Whether the job stops without a last checkpoint.")] = False


class CancelTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """The job that was asked to stop."""

    job: Annotated[TrainingJob, Meta(description="The job.")] = TrainingJob()


class ResumeTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request to continue a failed or cancelled job."""

    id: JobId = ""


class ResumeTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """The job that is queued again."""

    job: Annotated[TrainingJob, Meta(description="The job.")] = TrainingJob()


class DeleteTrainingJobRequest(Schema, frozen=True, kw_only=True):
    """A request to delete a job with its files."""

    id: JobId = ""
    cancel: Annotated[bool, Meta(description="Whether a running job is stopped first.")] = False


class DeleteTrainingJobResponse(Schema, frozen=True, kw_only=True):
    """What is left of a deleted job."""

    kept_model_path: Annotated[str, Meta(description="Folder of its finished model, which stays; or empty.")] = ""


GENERATE: Final = Method(
    service=INFERENCE, name="Generate", request=GenerateRequest, response=OutputDelta, streams=True
)
SCORE: Final = Method(service=INFERENCE, name="Score", request=ScoreRequest, response=ScoreResponse, bulk=True)
EMBED: Final = Method(service=INFERENCE, name="Embed", request=EmbedRequest, response=Embeddings)
TOKENIZE: Final = Method(service=INFERENCE, name="Tokenize", request=TokenizeRequest, response=Tokenization, bulk=True)
ATTENTION_MAPS: Final = Method(
    service=INFERENCE,
    name="AttentionMaps",
    request=AttentionMapsRequest,
    response=AttentionMap,
    streams=True,
    bulk=True,
)
GET_ENGINE_STATS: Final = Method(
    service=INFERENCE, name="GetEngineStats", request=GetEngineStatsRequest, response=EngineStats
)
LIST_MODELS: Final = Method(service=MODELS, name="ListModels", request=ListModelsRequest, response=ListModelsResponse)
GET_MODEL: Final = Method(service=MODELS, name="GetModel", request=GetModelRequest, response=GetModelResponse)
LOAD_MODEL: Final = Method(
    service=MODELS, name="LoadModel", request=LoadModelRequest, response=LoadModelResponse, changes=True
)
UNLOAD_MODEL: Final = Method(
    service=MODELS, name="UnloadModel", request=UnloadModelRequest, response=UnloadModelResponse, changes=True
)
SCALE_MODEL: Final = Method(
    service=MODELS, name="ScaleModel", request=ScaleModelRequest, response=ScaleModelResponse, changes=True
)
SLEEP: Final = Method(service=MODELS, name="Sleep", request=SleepRequest, response=SleepResponse, changes=True)
WAKE_UP: Final = Method(service=MODELS, name="WakeUp", request=WakeUpRequest, response=WakeUpResponse, changes=True)
UPDATE_WEIGHTS: Final = Method(
    service=MODELS, name="UpdateWeights", request=UpdateWeightsRequest, response=UpdateWeightsResponse,
    repeatable=False, changes=True,
)  # fmt: skip
LIST_MECHANISMS: Final = Method(
    service=CATALOG, name="ListMechanisms", request=ListMechanismsRequest, response=ListMechanismsResponse
)
GET_MECHANISM: Final = Method(
    service=CATALOG, name="GetMechanism", request=GetMechanismRequest, response=GetMechanismResponse
)
SUBMIT_TRAINING_JOB: Final = Method(
    service=TRAINING, name="SubmitTrainingJob", request=SubmitTrainingJobRequest, response=SubmitTrainingJobResponse,
    repeatable=False, changes=True,
)  # fmt: skip
ESTIMATE_TRAINING_JOB: Final = Method(
    service=TRAINING, name="EstimateTrainingJob", request=EstimateTrainingJobRequest,
    response=EstimateTrainingJobResponse,
)  # fmt: skip
GET_TRAINING_JOB: Final = Method(
    service=TRAINING, name="GetTrainingJob", request=GetTrainingJobRequest, response=GetTrainingJobResponse
)
LIST_TRAINING_JOBS: Final = Method(
    service=TRAINING, name="ListTrainingJobs", request=ListTrainingJobsRequest, response=ListTrainingJobsResponse
)
WATCH_TRAINING_JOB: Final = Method(
    service=TRAINING, name="WatchTrainingJob", request=WatchTrainingJobRequest, response=WatchTrainingJobResponse,
    streams=True,
)  # fmt: skip
CANCEL_TRAINING_JOB: Final = Method(
    service=TRAINING, name="CancelTrainingJob", request=CancelTrainingJobRequest, response=CancelTrainingJobResponse,
    changes=True,
)  # fmt: skip
RESUME_TRAINING_JOB: Final = Method(
    service=TRAINING, name="ResumeTrainingJob", request=ResumeTrainingJobRequest, response=ResumeTrainingJobResponse,
    changes=True,
)  # fmt: skip
DELETE_TRAINING_JOB: Final = Method(
    service=TRAINING, name="DeleteTrainingJob", request=DeleteTrainingJobRequest, response=DeleteTrainingJobResponse,
    repeatable=False, changes=True,
)  # fmt: skip

METHODS: Final[tuple[Row, ...]] = (
    GENERATE, SCORE, EMBED, TOKENIZE, ATTENTION_MAPS, GET_ENGINE_STATS,
    LIST_MODELS, GET_MODEL, LOAD_MODEL, UNLOAD_MODEL, SCALE_MODEL, SLEEP, WAKE_UP, UPDATE_WEIGHTS,
    LIST_MECHANISMS, GET_MECHANISM,
    SUBMIT_TRAINING_JOB, ESTIMATE_TRAINING_JOB, GET_TRAINING_JOB, LIST_TRAINING_JOBS, WATCH_TRAINING_JOB,
    CANCEL_TRAINING_JOB, RESUME_TRAINING_JOB, DELETE_TRAINING_JOB,
)  # fmt: skip
"""All calls."""
