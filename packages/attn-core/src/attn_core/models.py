"""Interfaces of language models: model families, and the methods that the engine and the trainer use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from attn_core.batch import Fields, ModelState, RaggedBatch
from attn_core.errors import InvalidValue
from attn_core.stores import ModelSpecs

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModel(Protocol):
    """What a family builds: a `torch.nn.Module` with these members. Tokens are int64."""

    vocab_size: int
    """Number of token ids."""
    max_seq_len: int
    """Longest sequence, in tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens], for training and scoring."""
        ...

    def state_specs(self) -> ModelSpecs:
        """The specs of the states of every layer, by layer name."""
        ...

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, width]."""
        ...

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> Mapping[int, Tensor]:
        """Attention weights [heads, query, key] of the given layers, by layer, for one sequence [tokens]."""
        ...


@runtime_checkable
class NamedMechanisms(Protocol):
    """A model that names the mechanisms of its layers."""

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanism of each layer of `state_specs` by the layer's name."""
        ...


class EncoderDecoderModel(LanguageModel, Protocol):
    """A language model that reads a source, such as a translation model.

    The source is encoded once, by `encode`, when a request enters the engine; its states are read-only from then on.
    Source and target share one vocabulary of `vocab_size` token ids.
    """

    max_encoder_len: int
    """Longest source, in tokens."""

    def forward(self, tokens: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens] over sources [batch, source].

        `key_padding_mask` [batch, source], bool, is True where a source token is real; padding comes last.
        Raises `InvalidValue` without a source.
        """
        ...

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """Source states, layer -> state -> field, of source tokens [source]."""
        ...

    def attention_maps(
        self, tokens: Tensor, layers: Sequence[int], source: Tensor | None = None
    ) -> Mapping[int, Tensor]:
        """Attention weights [heads, query, key] of the given layers, by layer, for a sequence [tokens] over a source
        [key]."""
        ...


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids, without special tokens if `skip_special`; invalid UTF-8 becomes U+FFFD."""
        ...


class RequestAdapter(Protocol):
    """A low-rank adapter (LoRA) that a request applies to the model; `key` identifies it."""

    key: str


class MixesAdapters(Protocol):
    """Applies adapters in the steps of a model."""

    mixes: bool
    """Whether one step may contain rows with different adapters, and rows without one."""

    def stepping(self, rows: Sequence[tuple[Any, int]]) -> AbstractContextManager[None]:
        """A context in which a step applies adapters: `rows` lists pairs of an adapter, or None, and its row count."""
        ...


@dataclass(frozen=True)
class PromptEmbeddings:
    """Embeddings that replace those of some tokens of a prompt, such as image embeddings.

    `rows` [places, embedding_size], floating point, are for the tokens at the ascending `places`. Prompts with equal
    tokens and an equal `key` have equal rows.

    `positions` [axes, tokens], int64, are the rotary positions of the prompt's tokens where these are not their places;
    the tokens after the prompt go on from the largest one, on all axes. The tokens of each of the `groups`, from a
    place to an exclusive end, see each other, within the window of a layer, and are computed in one step.
    """

    places: tuple[int, ...]
    rows: Tensor
    key: str
    positions: Tensor | None = None
    groups: tuple[tuple[int, int], ...] = ()

    def within(self, start: int, length: int) -> tuple[int, int]:
        """The slice (start, exclusive end) of `places` within the `length` tokens from `start` on."""
        return bisect_left(self.places, start), bisect_left(self.places, start + length)

    def concerns(self, start: int, length: int) -> bool:
        """Whether it gives the `length` tokens from `start` on anything."""
        first, last = self.within(start, length)
        return first < last or self.positions is not None or bool(self.groups_after(start))

    def groups_after(self, start: int) -> list[tuple[int, int]]:
        """The groups that do not end before the place `start`."""
        return [group for group in self.groups if group[1] > start]

    def group_around(self, place: int) -> tuple[int, int] | None:
        """The group that has tokens before and from `place` on, None if no group does."""
        return next((group for group in self.groups if group[0] < place < group[1]), None)


@dataclass(frozen=True)
class PlacedRows:
    """The given embeddings of one step: `rows` [places, embedding_size] for its tokens at the indices `places`
    [places], int64.

    `positions` [axes, tokens], int64, are the rotary positions of all tokens, None if they are those of the batch.
    `seen` [tokens], int64, is the last position that each token sees, None if that is its own for all.
    """

    places: Tensor
    rows: Tensor
    positions: Tensor | None = None
    seen: Tensor | None = None


@runtime_checkable
class TakesEmbeddings(Protocol):
    """A language model whose steps can take given embeddings for some tokens, such as embeddings of images."""

    embedding_size: int
    """Number of elements of an embedding."""

    def placing(self, placed: PlacedRows) -> AbstractContextManager[None]:
        """A context in which a step uses these rows as the embeddings of some of its tokens."""
        ...


class ModelFamily(ABC):
    """A kind of model that a plugin offers by name. `config` is the family's own frozen dataclass.

    To be saved by `attn_models.loading.save_model`, a model must have its config as the attribute `config`, of the
    class `Config`, whose method `plain` returns the values that `configure` takes.

    `learns` is the kind of training data: "text" (or pairs of source and target, if the config has a
    `max_encoder_len`), to predict the next token; "masked" text, "tags" of words, "labels" of
    texts, or "images".
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    learns: ClassVar[str] = "text"
    Config: ClassVar[type[Any] | None] = None

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> Any:
        """Build the family's config from plain values; raises a `UserError` that names a bad field."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """Build a `torch.nn.Module` with random weights; a `LanguageModel` if the family learns from text or pairs."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The published sizes of a well-known model, for cost estimates; `mechanism` is the attention it uses.

    `bias` says whether its projections have biases. Encoders are not `causal`. An encoder-decoder model has
    `encoder_layers` besides the `num_layers` of its decoder, whose layers also have cross-attention to the encoder.
    `vocab_size` is 0 for a model without token embeddings.

    With `num_experts`, every layer has that many feed-forward networks of the inner width `intermediate_size`, of which
    a token uses `num_experts_per_tok`. `parameters` is the number of weights of the whole model, `active_parameters`
    that of the weights that one token uses, if fewer, counting all embeddings; None where it is not known.
    """

    name: str
    summary: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    mechanism: str
    options: Mapping[str, Any] | None = None
    bias: bool = False
    causal: bool = True
    encoder_layers: int = 0
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None


@runtime_checkable
class GreedyHead(Protocol):
    """A language model that finds the most likely tokens without returning logits."""

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """The most likely token [rows], int64, of hidden states [rows, width]: the first of the largest logits.

        It is -1 where the largest logit is infinite or any is NaN. None if this is not supported, so that the caller
        must use `logits`.
        """
        ...


@runtime_checkable
class BatchInvariant(Protocol):
    """A language model that reports whether the result of a token is bitwise the same in steps of any batch size."""

    @property
    def batch_invariant(self) -> bool:
        """Whether it is, with a cache that returns rows as they were written."""
        ...


@runtime_checkable
class FindsLargest(Protocol):
    """A packed layer that finds the largest output of each row without returning all outputs."""

    def largest(self, rows: Tensor) -> Tensor | None:
        """The index of the largest output [...], int64, for rows [..., inputs], the first of equal ones.

        It is -1 where the largest is infinite or any output is NaN. None if this is not supported, so that the caller
        must compute all outputs.
        """
        ...


KvSharing = str | tuple[int, ...]
"""Which layer's keys and values each layer attends to: a pattern for the whole stack, or for each layer the number of a
layer, its own number if it computes its own; () if every layer computes its own.

"cla:2": groups of 2 neighbours attend to the keys and values of the first (cross-layer attention, Brandon et al. 2024,
arXiv 2405.12981). "yoco": the upper half attends to those of its first layer (decoder-decoder, Sun et al. 2024, arXiv
2405.05254).
"""

NEIGHBOURS = "cla:"
UPPER_HALF = "yoco"
FORMS = "'cla:N', 'yoco', or for every layer the number of the layer whose keys and values it uses"


def checked_kv_sharing(given: object, layers: int) -> KvSharing:
    """The given value, if it is a known pattern or fits this number of layers; raises `InvalidValue` otherwise."""
    if isinstance(given, str) and (given == UPPER_HALF or _group_size(given)):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidValue.of("kv_sharing", given, FORMS)
    if given and len(given) != layers:
        raise InvalidValue.of("kv_sharing", list(given), f"{layers} entries, one for each layer, or none")
    found: list[int] = []
    for layer, source_layer in enumerate(given):
        if not isinstance(source_layer, int) or isinstance(source_layer, bool) or not 0 <= source_layer <= layer:
            raise InvalidValue.of(f"kv_sharing[{layer}]", source_layer, f"a layer from 0 to {layer}")
        if source_layer < layer and found[source_layer] != source_layer:
            raise InvalidValue.of(
                f"kv_sharing[{layer}]", source_layer, f"{layer}, or a layer that has its own keys and values"
            )
        found.append(source_layer)
    return tuple(found)


def kv_source_layer_of(kv_sharing: KvSharing, layer: int, layers: int) -> int:
    """The number of the layer, of `layers`, whose keys and values `layer` attends to: its own if it computes them."""
    if kv_sharing == UPPER_HALF:
        return min(layer, layers // 2)
    if isinstance(kv_sharing, str):
        return layer - layer % _group_size(kv_sharing)
    return kv_sharing[layer] if kv_sharing else layer


def _group_size(words: str) -> int:
    """N of "cla:N"; 0 for any other text."""
    count = words.removeprefix(NEIGHBOURS)
    return int(count) if words.startswith(NEIGHBOURS) and count.isascii() and count.isdecimal() else 0
