"""Calls of the inference service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from attn.v1 import inference_pb2 as pb
from attn_core.errors import InternalError, InvalidValue
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EmbedRequest,
    EngineStats,
    GenerateRequest,
    OutputDelta,
    Prompt,
    PromptLike,
    ScoreRequest,
    SequenceScore,
    Tokenization,
    TokenizeRequest,
)
from attn_schema.codec import from_message, message_class, to_message

from attn_client.operations import Operation

SERVICE = "/attn.v1.InferenceService"


def generate(request: GenerateRequest) -> Operation[Any, OutputDelta]:
    """Generate the completions of a prompt, as a stream of deltas."""
    return Operation(
        f"{SERVICE}/Generate", to_message(request), message_class(OutputDelta), partial(from_message, OutputDelta)
    )


def score(
    model: str, prompts: Sequence[PromptLike], top_logprobs: int
) -> Operation[pb.ScoreResponse, list[SequenceScore]]:
    """Compute the log probabilities of sequences."""
    request = ScoreRequest(model=model, prompts=tuple(map(Prompt.of, prompts)), top_logprobs=top_logprobs)

    def result(answer: pb.ScoreResponse) -> list[SequenceScore]:
        return [from_message(SequenceScore, item) for item in answer.scores]

    return Operation(f"{SERVICE}/Score", to_message(request), pb.ScoreResponse, result)


def embed(model: str, texts: Sequence[str]) -> Operation[Any, list[tuple[float, ...]]]:
    """Compute one vector for each text; raises `InvalidValue` if `texts` is not a list of texts."""
    if isinstance(texts, str):
        raise InvalidValue.of("texts", texts, "a list of texts")
    request = EmbedRequest(model=model, texts=tuple(texts))

    def result(answer: Any) -> list[tuple[float, ...]]:
        rows = from_message(Embeddings, answer).rows()
        if len(rows) != len(texts):
            raise InternalError(f"the server sent {len(rows)} vectors for {len(texts)} texts")
        return rows

    return Operation(f"{SERVICE}/Embed", to_message(request), message_class(Embeddings), result)


def tokenize(model: str, prompt: PromptLike) -> Operation[Any, Tokenization]:
    """Tokenise a prompt."""
    request = TokenizeRequest(model=model, prompt=Prompt.of(prompt))
    return Operation(
        f"{SERVICE}/Tokenize", to_message(request), message_class(Tokenization), partial(from_message, Tokenization)
    )


def attention_maps(
    model: str, prompt: PromptLike, layers: Sequence[int], heads: Sequence[int], *, gradients: bool = False
) -> Operation[Any, AttentionMap]:
    """Compute the attention weights of a prompt, as a stream with one map for each layer."""
    request = AttentionMapsRequest(
        model=model, prompt=Prompt.of(prompt), layers=tuple(layers), heads=tuple(heads), gradients=gradients
    )
    return Operation(
        f"{SERVICE}/AttentionMaps",
        to_message(request),
        message_class(AttentionMap),
        partial(from_message, AttentionMap),
    )


def engine_stats(model: str) -> Operation[Any, EngineStats]:
    """Get the load and counters of a model's engine."""
    request = pb.GetEngineStatsRequest(model=model)
    return Operation(
        f"{SERVICE}/GetEngineStats", request, message_class(EngineStats), partial(from_message, EngineStats)
    )
