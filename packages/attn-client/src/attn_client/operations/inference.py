"""Requests to models."""

from __future__ import annotations

from collections.abc import Sequence

from attn.v1 import inference_pb2 as pb
from attn_core.errors import InvalidValue

from attn_client.operations import Operation
from attn_client.results.inference import AttentionMap, Chunk, Load, Score, Tokenization
from attn_client.results.tensors import rows_of
from attn_client.sampling import Prompt, Sampling, prompt_message

SERVICE = "/attn.v1.InferenceService"


def generate(model: str, prompt: Prompt, sampling: Sampling | None) -> Operation[pb.GenerateResponse, Chunk]:
    """A completion of a prompt, in chunks."""
    request = pb.GenerateRequest(
        model=model, prompt=prompt_message(prompt), sampling=(sampling or Sampling()).message()
    )
    return Operation(f"{SERVICE}/Generate", request, pb.GenerateResponse, Chunk.of)


def score(model: str, prompts: Sequence[Prompt], top_logprobs: int) -> Operation[pb.ScoreResponse, list[Score]]:
    """The log probabilities of sequences."""
    request = pb.ScoreRequest(model=model, prompts=map(prompt_message, prompts), top_logprobs=top_logprobs)
    return Operation(f"{SERVICE}/Score", request, pb.ScoreResponse, lambda answer: [*map(Score.of, answer.scores)])


def embed(model: str, texts: Sequence[str]) -> Operation[pb.EmbedResponse, list[tuple[float, ...]]]:
    """A vector for each text; raises `InvalidValue` for anything but texts."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InvalidValue.of("texts", texts, "texts, in a list")
    request = pb.EmbedRequest(model=model, texts=texts)
    return Operation(
        f"{SERVICE}/Embed", request, pb.EmbedResponse, lambda answer: rows_of(answer.embeddings, len(texts))
    )


def tokenize(model: str, prompt: Prompt) -> Operation[pb.TokenizeResponse, Tokenization]:
    """The tokens of a prompt."""
    request = pb.TokenizeRequest(model=model, prompt=prompt_message(prompt))
    return Operation(f"{SERVICE}/Tokenize", request, pb.TokenizeResponse, Tokenization.of)


def attention_maps(
    model: str, prompt: Prompt, layers: Sequence[int], heads: Sequence[int]
) -> Operation[pb.AttentionMapsResponse, AttentionMap]:
    """The attention weights of a prompt, layer by layer."""
    request = pb.AttentionMapsRequest(model=model, prompt=prompt_message(prompt), layers=layers, heads=heads)
    return Operation(f"{SERVICE}/AttentionMaps", request, pb.AttentionMapsResponse, AttentionMap.of)


def get_load(model: str) -> Operation[pb.GetLoadResponse, Load]:
    """How busy a model is."""
    return Operation(f"{SERVICE}/GetLoad", pb.GetLoadRequest(model=model), pb.GetLoadResponse, Load.of)
