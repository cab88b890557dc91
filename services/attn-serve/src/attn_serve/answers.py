"""What a served model answers, in plain values that cross processes cheaply."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attn_core.errors import AttnError


class Finish(StrEnum):
    """Why a completion ended."""

    END = "end"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A likely token at a position and its log probability in nats."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """A token, its own text, and its log probability where asked for."""

    id: int
    text: str
    logprob: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Token counts of a request."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """News of one completion of a request after one engine step; `finish` or `error` is set on its last chunk.

    `choice` says which completion it is; `usage` is what all cost together, on the last chunk of the request.
    """

    request: str
    tokens: tuple[TokenAnswer, ...] = ()
    text: str = ""
    finish: Finish | None = None
    stop: str = ""
    usage: UsageAnswer | None = None
    error: AttnError | None = None
    choice: int = 0
    score: float | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.usage is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class SequenceAnswer:
    """Scores of one sequence; the first token has no log probability."""

    tokens: tuple[TokenAnswer, ...]

    @property
    def total(self) -> float:
        """Sum of the log probabilities, in nats."""
        return sum(token.logprob or 0.0 for token in self.tokens)


@dataclass(frozen=True, slots=True)
class TokenizedAnswer:
    """The tokens of a prompt and the text that was tokenised."""

    tokens: tuple[TokenAnswer, ...]
    text: str


@dataclass(frozen=True, slots=True)
class MapAnswer:
    """Weights of one layer: float32, little-endian, row-major, of shape [heads, query, key]."""

    layer: int
    mechanism: str
    heads: tuple[int, ...]
    shape: tuple[int, int, int]
    weights: bytes
    labels: tuple[str, ...]
    key_labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingsAnswer:
    """Vectors of texts: float32, little-endian, row-major, of shape [texts, width]; and the tokens of all texts."""

    shape: tuple[int, int]
    vectors: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """How busy an engine is; counters run since the model was loaded."""

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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is."""

    architecture: str
    mechanisms: tuple[str, ...]
    parameters: int
    context: int
    vocabulary: int
    layers: int
    heads: int
    dtype: str
    weights: str
    device: str
    chat: bool
    note: str = ""
