"""A model: a family that builds it from a config, and what the engine and trainer may ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from attn_core.batch import Fields, ModelState, RaggedBatch
from attn_core.store import ModelSpecs

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModel(Protocol):
    """What a family builds: a `torch.nn.Module` with these members. Tokens are int64."""

    vocabulary: int
    """Number of token ids."""
    context: int
    """Longest sequence, in tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens]: training and scoring."""
        ...

    def state_specs(self) -> ModelSpecs:
        """What every layer must remember, by layer name."""
        ...

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden rows [tokens, width] of the new tokens [tokens] of many requests."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden rows [rows, width]."""
        ...

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> Mapping[int, Tensor]:
        """Attention weights [heads, query, key] by layer of one sequence [tokens]."""
        ...


@runtime_checkable
class NamedMechanisms(Protocol):
    """A model that says what attends in its layers."""

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanism of each layer of `state_specs` by the layer's name."""
        ...


class SourceModel(LanguageModel, Protocol):
    """A language model that reads a source, such as a translation model.

    The source is read once, by `encode`, when a request enters the engine; its states are read-only from then on. Token
    ids of the source are those of `vocabulary`, too.
    """

    source_context: int
    """Longest source, in tokens."""

    def forward(self, tokens: Tensor, source: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens] over sources [batch, source].

        `keep` [batch, source], bool, is True where a source token is real; padding stands at the end. Raises
        `InvalidValue` without a source.
        """
        ...

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """Source states, layer -> state -> field, of source tokens [source]."""
        ...

    def attention_maps(
        self, tokens: Tensor, layers: Sequence[int], source: Tensor | None = None
    ) -> Mapping[int, Tensor]:
        """Weights [heads, query, key] by layer of the sequence [tokens] over the source [key]."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not valid UTF-8 become U+FFFD."""
        ...


class ModelFamily(ABC):
    """A kind of model that a plugin offers by name. `config` is the family's own frozen dataclass.

    `learns` says from what it is trained: "text", or pairs of source and target where its config has a
    `source_context`, both by predicting the next token; "masked" text, "tags" of words, or "images".
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    learns: ClassVar[str] = "text"

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> Any:
        """The family's config from plain values; raises a `UserError` that names a bad field."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """A fresh `torch.nn.Module` with random weights; a `LanguageModel` where it learns from text or pairs."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The published sizes of a well-known model, for prices; `mechanism` is the attention it uses.

    With `experts` every layer has so many feed-forwards of the inner width `hidden`, of which a token uses
    `experts_per_token`. `parameters` counts the weights of the whole model, `active_parameters` those that one token
    uses where they are fewer; None where nobody has counted them.
    """

    name: str
    summary: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    mechanism: str
    options: Mapping[str, Any] | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
