"""Calls of the inference service."""

from __future__ import annotations

from collections.abc import Sequence

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
from attn_schema import methods as rows

from attn_client.operations import Operation, same


def generate(request: GenerateRequest) -> Operation[OutputDelta]:
    """Generate the completions of a prompt, as a stream of deltas."""
    return Operation(rows.GENERATE, request, same)


def score(model: str, prompts: Sequence[PromptLike], top_logprobs: int) -> Operation[list[SequenceScore]]:
    """Compute the log probabilities of sequences."""
    request = ScoreRequest(model=model, prompts=tuple(map(Prompt.of, prompts)), top_logprobs=top_logprobs)

    def scores(answer: rows.ScoreResponse) -> list[SequenceScore]:
        return list(answer.scores)

    return Operation(rows.SCORE, request, scores)


def embed(model: str, texts: Sequence[str]) -> Operation[list[tuple[float, ...]]]:
    """Compute one vector for each text; raises `InvalidValue` if `texts` is not a list of texts."""
    if isinstance(texts, str):
        raise InvalidValue.of("texts", texts, "a list of texts")

    def vectors(answer: Embeddings) -> list[tuple[float, ...]]:
        found = answer.rows()
        if len(found) != len(texts):
            raise InternalError(f"the server sent {len(found)} vectors for {len(texts)} texts")
        return found

    return Operation(rows.EMBED, EmbedRequest(model=model, texts=tuple(texts)), vectors)


def tokenize(model: str, prompt: PromptLike) -> Operation[Tokenization]:
    """Tokenise a prompt."""
    return Operation(rows.TOKENIZE, TokenizeRequest(model=model, prompt=Prompt.of(prompt)), same)


def attention_maps(
    model: str, prompt: PromptLike, layers: Sequence[int], heads: Sequence[int], *, gradients: bool = False
) -> Operation[AttentionMap]:
    """Compute the attention weights of a prompt, as a stream with one map for each layer."""
    request = AttentionMapsRequest(
        model=model, prompt=Prompt.of(prompt), layers=tuple(layers), heads=tuple(heads), gradients=gradients
    )
    return Operation(rows.ATTENTION_MAPS, request, same)


def engine_stats(model: str) -> Operation[EngineStats]:
    """Get the load and counters of a model's engine."""
    return Operation(rows.GET_ENGINE_STATS, rows.GetEngineStatsRequest(model=model), same)
