"""What requests to models return."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attn.v1 import common_pb2
from attn.v1 import inference_pb2 as pb
from attn_core.errors import InternalError

from attn_client.results.tensors import floats_of


class FinishReason(StrEnum):
    """Why a completion ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"


FINISH_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A token the model could have produced; `logprob` in nats."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token; `logprob` in nats, where it was asked for and something precedes the token."""

    id: int
    text: str
    logprob: float | None = None
    alternatives: tuple[Alternative, ...] = ()

    @classmethod
    def of(cls, message: common_pb2.Token) -> Token:
        """From the wire."""
        return cls(
            id=message.id,
            text=message.text,
            logprob=message.logprob if message.HasField("logprob") else None,
            alternatives=tuple(Alternative(id=a.id, text=a.text, logprob=a.logprob) for a in message.alternatives),
        )


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, message: common_pb2.Usage) -> Usage:
        """From the wire."""
        return cls(
            prompt_tokens=message.prompt_tokens,
            cached_tokens=message.cached_tokens,
            completion_tokens=message.completion_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a completion. The texts of all chunks joined are the completion; only the last has a `finish_reason`.

    `stop` is the stop string that ended it. `usage` is what the whole request cost, on its last chunk. Where several
    completions were asked for, their chunks come mixed, and `choice` says to which each belongs. `score` is
    what a beam search gave the completion, on its last chunk.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    choice: int = 0
    score: float | None = None

    @classmethod
    def of(cls, message: pb.GenerateResponse) -> Chunk:
        """From the wire."""
        return cls(
            text=message.text,
            tokens=tuple(map(Token.of, message.tokens)),
            finish_reason=FINISH_REASONS.get(message.finish_reason),
            stop=message.stop or None,
            usage=Usage.of(message.usage) if message.HasField("usage") else None,
            choice=message.choice,
            score=message.score if message.HasField("score") else None,
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole completion; `usage` is what its request cost, all completions together."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop: str | None
    usage: Usage
    score: float | None = None

    @classmethod
    def of(cls, chunks: list[Chunk]) -> Completion:
        """The first completion of all chunks; raises `InternalError` if the server did not say how it ended."""
        return cls.all_of(chunks)[0]

    @classmethod
    def all_of(cls, chunks: list[Chunk]) -> list[Completion]:
        """Every completion of all chunks; raises `InternalError` if the server did not say how one of them ended."""
        choices: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            choices.setdefault(chunk.choice, []).append(chunk)
        usage = chunks[-1].usage if chunks else None
        return [cls._joined(choices[choice], usage) for choice in sorted(choices)] or [cls._joined([], usage)]

    @classmethod
    def _joined(cls, chunks: list[Chunk], usage: Usage | None) -> Completion:
        last = chunks[-1] if chunks else None
        if last is None or last.finish_reason is None or usage is None:
            raise InternalError("the server ended the completion without saying why")
        return cls(
            text="".join(chunk.text for chunk in chunks),
            tokens=tuple(token for chunk in chunks for token in chunk.tokens),
            finish_reason=last.finish_reason,
            stop=last.stop,
            usage=usage,
            score=last.score,
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """The tokens of a sequence with their log probabilities, and the sum of these in nats."""

    tokens: tuple[Token, ...]
    sum_logprob: float

    @classmethod
    def of(cls, message: pb.SequenceScore) -> Score:
        """From the wire."""
        return cls(tokens=tuple(map(Token.of, message.tokens)), sum_logprob=message.sum_logprob)


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """The tokens a prompt becomes, and the text they were made of."""

    tokens: tuple[Token, ...]
    text: str

    @classmethod
    def of(cls, message: pb.TokenizeResponse) -> Tokenization:
        """From the wire."""
        return cls(tokens=tuple(map(Token.of, message.tokens)), text=message.text)


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """The attention weights of a layer.

    `weights` is [heads, queries, keys] in float32, as a memoryview: `.tolist()` gives nested lists, and
    `numpy.asarray(weights)` an array without a copy. `heads` says which heads these are.
    """

    layer: int
    mechanism: str
    heads: tuple[int, ...]
    weights: memoryview[float]
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]

    @classmethod
    def of(cls, message: pb.AttentionMapsResponse) -> AttentionMap:
        """From the wire; raises `InternalError` for a tensor that is not what it says."""
        shape = (len(message.heads), len(message.query_tokens), len(message.key_tokens))
        return cls(
            layer=message.layer,
            mechanism=message.mechanism,
            heads=tuple(message.heads),
            weights=floats_of(message.weights, shape),
            query_tokens=tuple(message.query_tokens),
            key_tokens=tuple(message.key_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a model's engine is; counts are since the model was loaded."""

    running: int
    waiting: int
    state_tokens_used: int
    state_tokens_total: int
    preemptions: int
    cached_tokens: int
    generated_tokens: int
    guessed_tokens: int
    accepted_tokens: int
    computed_tokens: int
    reloaded_tokens: int
    offloaded_bytes: int

    @classmethod
    def of(cls, message: pb.GetLoadResponse) -> Load:
        """From the wire."""
        return cls(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})
