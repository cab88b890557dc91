"""Language models: what a family builds, and what the engine and the trainer may ask of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class EncoderDecoderModel(LanguageModel, Protocol):
    """A language model that reads a source, such as a translation model.

    The source is read once, by `encode`, when a request enters the engine; its states are read-only from then on. Token
    ids of the source are those of `vocab_size`, too.
    """

    max_encoder_len: int
    """Longest source, in tokens."""

    def forward(self, tokens: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens] over sources [batch, source].

        `key_padding_mask` [batch, source], bool, is True where a source token is real; padding stands at the end.
        Raises `InvalidValue` without a source.
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
        """Text of token ids, without special tokens unless asked for; bytes that are no UTF-8 become U+FFFD."""
        ...


class RequestAdapter(Protocol):
    """An adapter of low rank that a request uses on the model; `key` tells it from all others."""

    key: str


class MixesAdapters(Protocol):
    """What lets steps of a model use adapters."""

    mixes: bool
    """Whether one step may have rows of several adapters, or of some and none."""

    def stepping(self, rows: Sequence[tuple[Any, int]]) -> AbstractContextManager[None]:
        """Within it, a step uses adapters: for each, or None, in order, how many rows are its own."""
        ...


@runtime_checkable
class TakesEmbeddings(Protocol):
    """A language model whose steps take rows in the place of embeddings of some tokens, such as rows of images."""

    embedding_size: int
    """Elements of a row."""

    def placing(self, places: Tensor, rows: Tensor) -> AbstractContextManager[None]:
        """Within it, a step takes `rows` [places, embedding_size] for its tokens at `places` [places], int64."""
        ...


class ModelFamily(ABC):
    """A kind of model that a plugin offers by name. `config` is the family's own frozen dataclass.

    Models that are saved by `attn_models.loading.save_model` have their config as `config`; its class is `Config`, and
    its method `plain` gives the values that `configure` takes.

    `learns` says from what it is trained: "text", or pairs of source and target where its config has a
    `max_encoder_len`, both by predicting the next token; "masked" text, "tags" of words, or "images".
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    learns: ClassVar[str] = "text"
    Config: ClassVar[type[Any] | None] = None

    @abstractmethod
    def configure(self, values: Mapping[str, Any]) -> Any:
        """The family's config from plain values; raises a `UserError` that names a bad field."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """A fresh `torch.nn.Module` with random weights; a `LanguageModel` where it learns from text or pairs."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The published sizes of a well-known model, for prices; `mechanism` is the attention it uses.

    `bias` says whether its projections have one. Encoders are not `causal`. A model of sequence to sequence has
    `encoder_layers` beside its `num_layers` of the decoder, which attend to the encoder's rows in attention of their
    own. `vocab_size` is 0 where nothing is looked up.

    With `experts` every layer has so many feed-forwards of the inner width `intermediate_size`, of which a token uses
    `num_experts_per_tok`. `parameters` counts the weights of the whole model, `active_parameters` those that one token
    uses where they are fewer, embeddings counted whole; None where nobody has counted them.
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
    """A language model that finds likeliest tokens without giving logits."""

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """The likeliest token [rows], int64, of hidden rows [rows, width]: the first of the largest logits.

        It is -1 where the largest is infinite or any logit is NaN. None where only `logits` can tell.
        """
        ...


@runtime_checkable
class BatchInvariant(Protocol):
    """A language model that can say whether a token gets the same bits alone and beside others of a step."""

    @property
    def batch_invariant(self) -> bool:
        """Whether it does, over caches that give rows back as they were written."""
        ...


@runtime_checkable
class FindsLargest(Protocol):
    """A packed layer that finds the largest output of each row without giving all outputs."""

    def largest(self, rows: Tensor) -> Tensor | None:
        """The place of the largest output [...], int64, of rows [..., inputs], the first of equal ones.

        It is -1 where the largest is infinite or any output is NaN. None where only all outputs can tell.
        """
        ...


KvSharing = str | tuple[int, ...]
"""Which layer's keys and values each layer attends to: a name for the whole stack, or one layer number for each layer,
its own number where it makes its own; () where every layer makes its own.

"cla:2": groups of 2 neighbours attend to the keys and values of the first (cross-layer attention, Brandon et al. 2024,
arXiv 2405.12981). "yoco": the upper half attends to those of its first layer (decoder-decoder, Sun et al. 2024, arXiv
2405.05254).
"""

NEIGHBOURS = "cla:"
UPPER_HALF = "yoco"
FORMS = "'cla:N', 'yoco', or for every layer the number of the layer whose keys and values it uses"


def checked_kv_sharing(given: object, layers: int) -> KvSharing:
    """What was given, if it is a word or fits so many layers; raises `InvalidValue` otherwise."""
    if isinstance(given, str) and (given == UPPER_HALF or _joined(given)):
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
    """The number of the layer whose keys and values `layer`, of `layers`, attends to: its own where it makes them."""
    if kv_sharing == UPPER_HALF:
        return min(layer, layers // 2)
    if isinstance(kv_sharing, str):
        return layer - layer % _joined(kv_sharing)
    return kv_sharing[layer] if kv_sharing else layer


def _joined(words: str) -> int:
    """N of "cla:N"; 0 where it is something else."""
    count = words.removeprefix(NEIGHBOURS)
    return int(count) if words.startswith(NEIGHBOURS) and count.isascii() and count.isdecimal() else 0
