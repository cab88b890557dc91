"""Requests and results that need more than their fields: what both clients check before a call, and after it."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import InternalError, InvalidValue
from attn_schema import DeploymentConfig, Embeddings, EmbedRequest, EngineConfig, Prompt, PromptLike, ScoreRequest
from attn_schema.codec import require_wire
from attn_schema.methods import LoadModelRequest


def score_request(model: str, prompts: Sequence[PromptLike], top_logprobs: int) -> ScoreRequest:
    """The request for the log probabilities of sequences; raises `InvalidValue` for an invalid prompt."""
    return ScoreRequest(model=model, prompts=tuple(map(Prompt.of, prompts)), top_logprobs=top_logprobs)


def embed_request(model: str, texts: Sequence[str]) -> EmbedRequest:
    """The request for one vector for each text; raises `InvalidValue` if `texts` is not a list of texts."""
    if isinstance(texts, str):
        raise InvalidValue.of("texts", texts, "a list of texts")
    return EmbedRequest(model=model, texts=tuple(texts))


def vectors(texts: Sequence[str], found: Embeddings) -> list[tuple[float, ...]]:
    """The vectors of texts; raises `InternalError` if there is not one for each."""
    rows = found.rows()
    if len(rows) != len(texts):
        raise InternalError(f"the server sent {len(rows)} vectors for {len(texts)} texts")
    return rows


def load_request(
    name: str, source: str, engine: EngineConfig | None, deployment: DeploymentConfig | None, base_model: str = ""
) -> LoadModelRequest:
    """The request to load a model, or an adapter on a model.

    Raises `InvalidValue` for engine settings that the protobuf message does not carry, such as `num_threads`.
    """
    engine, deployment = engine or EngineConfig(), deployment or DeploymentConfig()
    for settings in (engine, deployment):
        require_wire(settings)
    return LoadModelRequest(name=name, source=source, engine=engine, deployment=deployment, base_model=base_model)
