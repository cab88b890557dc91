"""What is asked of a served model, in plain values that cross processes cheaply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True)
class SourceInput:
    """What a model with a source reads, as text or token ids."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptInput:
    """A prompt in exactly one of three forms: text, token ids, or turns of (role, content).

    With a `source` it is the beginning of what is written, and may be left out.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    chat: tuple[tuple[str, str], ...] | None = None
    source: SourceInput | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One completion to make. `sampling` holds the fields given for the engine's Sampling; `seconds` is what is
    left until the caller's deadline, None without one. Requests of one `tenant` share a fair share of the engine, and
    beginnings that are remembered."""

    id: str
    prompt: PromptInput
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A prompt whose tokens are to be scored, with this many alternatives each; the rest is as in `Generation`."""

    id: str
    prompt: PromptInput
    alternatives: int = 0
    seconds: float | None = None
    tenant: str = ""


Asked: TypeAlias = Generation | Scored
"""What the engine is asked to do, whose news come as a stream of chunks."""


@dataclass(frozen=True, kw_only=True)
class MapsWanted:
    """Attention maps to compute: of these layers and query heads, all where empty."""

    prompt: PromptInput
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TextsWanted:
    """Texts to turn into vectors; `seconds` is what is left until the caller's deadline, None without one.

    Whoever wants them no more cancels under the `id`.
    """

    id: str
    texts: tuple[str, ...]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How to run a model; None leaves the choice to the engine.

    `state_bytes` bounds the memory for the states of all requests, which the cache of that name keeps; `threads` are
    those of tensor operations. `weights`, one of `WEIGHT_CHOICES`, packs those of linear layers. `guesses`
    are tokens guessed ahead for requests that do not say, by the model `draft` where one is named; None is 4 with a
    draft and none without; of more than one of `branches` a guess is a tree. `offload_bytes` bounds the memory for
    states of requests that had to leave. `shares` are those of tenants, 1 where none is given.
    """

    dtype: str = "float32"
    device: str = "cpu"
    kernel: str | None = None
    cache: str = "shared"
    max_sequences: int | None = None
    max_batch_tokens: int | None = None
    state_bytes: int | None = None
    threads: int | None = None
    weights: str = "auto"
    guesses: int | None = None
    draft: str | None = None
    offload_bytes: int = 0
    branches: int = 1
    shares: Mapping[str, float] = field(default_factory=dict)
