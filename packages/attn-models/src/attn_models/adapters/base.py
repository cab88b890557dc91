"""Base classes of state dict adapters, which alone know the config keys and tensor names of another library."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from attn_core.checks import require_whole, whole
from attn_core.errors import Incompatible, InvalidValue
from attn_core.scores import ScaledDot
from attn_schema.decoder import OWN_BIASES, DecoderConfig, FeedForwardKind
from attn_schema.schema import MAX_INT32

from attn_models.attention import LayerAttention, layer_attentions


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and the model parameters that it holds.

    `parameters` are concatenated along the first axis, within each of `groups` equal blocks of that axis (such as
    heads). parameter = (stored tensor, its two axes transposed if `transposed`) * `scale` + `offset`. `float32` keeps
    the tensor in float32 whatever the dtype of the weights. `depthwise` tensors have a second axis of size one, like
    the filters of a `torch.nn.Conv1d` with one group per channel. A `stacked` tensor has a first axis of this length,
    such as one index per expert, over which `parameters` are divided in order and equally; the other fields then apply
    to each index. With `rows`, the first and the last (exclusive), it holds only these rows of its parameter, and other
    tensors the others, in order. With `shape` it has this shape, and the elements of its parameter.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False
    offset: float = 0.0
    scale: float = 1.0
    groups: int = 1
    float32: bool = False
    depthwise: bool = False
    stacked: int = 0
    rows: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None

    def shares(self) -> list[StoredTensor]:
        """The parts of a stacked tensor along its first axis; the tensor itself if it is not stacked."""
        if not self.stacked:
            return [self]
        each = len(self.parameters) // self.stacked
        parts = [self.parameters[place * each : (place + 1) * each] for place in range(self.stacked)]
        return [dataclasses.replace(self, parameters=part, stacked=0) for part in parts]


class Layout(ABC):
    """The tensor names of a kind of checkpoint. `model_type` is the one in its config.json.

    `head` is the name of the unembedding, which a checkpoint may hold although it is tied to the parameter `embedding`.
    Tensors whose names match `derived_names` are skipped: they follow from the config, such as causal masks in older
    checkpoints, or are unused. `copies` maps further tensor names to the names that are read; if a checkpoint has both,
    the tensors must be equal. No checkpoint holds the parameters that match `zeros` or `ones`; they are set to zero
    or to one (biases and gains that a family does not have), and must be so where a model is written, except those that
    match `unread`, which do not affect the output. `keys` are the keys of config.json
    that hold fields of the config and options of its mechanisms, where their names differ; errors name them. `aliases`
    are further names of keys, by which transformers reads them too (its `attribute_map`).
    """

    model_type: ClassVar[str]
    head: ClassVar[str] = ""
    embedding: ClassVar[str] = "embedding.weight"
    copies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    derived_names: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    zeros: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    unread: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    keys: ClassVar[Mapping[str, str]] = MappingProxyType({})
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ones: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")

    @property
    def name(self) -> str:
        """The name under which the layout is registered: its `model_type`."""
        return self.model_type

    @abstractmethod
    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """The tensors of a checkpoint of a model with these parameters."""

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names that `tensor_mappings` uses to the names of the same tensors in the checkpoint."""
        return {name: name for name in names}

    def stored(self, parameters: Iterable[str]) -> list[StoredTensor]:
        """The tensors of a checkpoint of a model with these parameters, except those that are `constant`."""
        return self.tensor_mappings([name for name in parameters if self.constant(name) is None])

    def constant(self, name: str) -> float | None:
        """The value of every element of a parameter that no checkpoint holds; None for any other parameter."""
        patterns = {0.0: self.zeros, 1.0: self.ones}
        return next((value for value, pattern in patterns.items() if pattern.search(name)), None)

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of this name is skipped, because it follows from the config or is not used."""
        return bool(self.derived_names.search(name))


def with_base_prefix(names: Iterable[str], embedding: str, head: str) -> dict[str, str]:
    """Map a layout's names to the checkpoint's, where a model saved without its head lacks their first component.

    `embedding` is the layout's name of the embedding, `head` that of the unembedding.
    """
    first, dot, _ = embedding.partition(".")
    prefix, known = first + dot, list(names)
    if not dot or any(name.startswith(prefix) for name in known):
        return {name: name for name in known}
    owner = head.removesuffix("weight")
    return {name if name.startswith(owner) else prefix + name: name for name in known}


KEYS: dict[str, str] = {
    "max_seq_len": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "inner_width": "intermediate_size",
    "window": "sliding_window",
}
"""The `keys` that most families of decoders share."""
ATTENTION = ("mechanism", "options", "pattern")
ROTARY = ("rope_theta", "partial_rotary_factor", "rope_interleave", "rope_scaling")
SKIPPED = (*ATTENTION, *ROTARY, *OWN_BIASES, "bias", "num_kv_heads", "head_dim", "intermediate_size")
"""Fields that are compared through what follows from them; rotary positions are part of each layer's attention."""
TRAINED = (
    "dropout",
    "attention_dropout",
    "router_aux_loss_coef",
    "router_bias_update_rate",
    "nextn_predict_loss_weight",
)
"""Fields that only training reads, which a config.json may omit."""


class StateDictAdapter(Layout):
    """Translates the config.json and tensor names of a library's decoders to attn's and back.

    `known_keys` are the keys of config.json that `from_hf_config` reads. `Config` is the class of the configs: the
    general decoder's, or that of a family with its own model class, which `build` builds (see docs/model-families.md).
    `by_tensors` are fields that depend on which tensors a checkpoint has, see `without_missing`.
    """

    known_keys: ClassVar[frozenset[str]]
    keys: ClassVar[Mapping[str, str]] = KEYS
    by_tensors: ClassVar[frozenset[str]] = frozenset()
    Config: ClassVar[type[Any]] = DecoderConfig

    def build(self, config: Any) -> Any:
        """Build an `attn_core.models.LanguageModel` with random weights, whose attribute `config` is the one given."""
        from attn_models.decoder.decoder import Decoder

        return Decoder(config)

    def layout(self, config: Any) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """The layout with the tensor names of this decoder's checkpoints."""
        return self

    @abstractmethod
    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """Build the decoder config from a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    def without_missing(self, config: Any, names: Iterable[str]) -> Any:  # noqa: ARG002  (few leave out)
        """Remove from the config the modules that its config.json describes but for which `names` has no tensors."""
        return config

    @abstractmethod
    def keys_of(self, config: Any) -> dict[str, Any]:
        """The keys of config.json that describe a decoder; `to_hf_config` checks that they describe it completely."""

    def to_hf_config(self, config: Any) -> dict[str, Any]:
        """The config.json of a decoder; raises `Incompatible` naming what the layout cannot express.

        The result is read back with `from_hf_config`, so that a field which an adapter omits is refused by name.
        """
        try:
            values = self.keys_of(config)
            again = self.from_hf_config(values)
        except InvalidValue as error:
            message = f"this decoder cannot be expressed in a {self.model_type} config.json: {error.message}"
            raise Incompatible(message, **error.metadata) from error
        changed = self.differences(again, config)
        if changed:
            fields: dict[str, Any] = {name: getattr(config, name, None) for name in changed}
            if "mechanism" in fields:
                fields["mechanism"] = fields["mechanism"].rpartition("/")[2]
            raise inexpressible(fields, self.model_type)
        return values

    def differences(self, one: Any, other: Any) -> list[str]:
        """The fields by which two configs differ in what their models compute."""
        skipped = {*TRAINED, *self.by_tensors}
        if not isinstance(one, DecoderConfig) or not isinstance(other, DecoderConfig):
            names = (item.name for item in dataclasses.fields(one) if item.name not in skipped)
            return [name for name in names if _given(one, name) != _given(other, name)]
        plain = (name for name in one.plain() if name not in (*SKIPPED, *skipped))
        changed = [name for name in plain if getattr(one, name) != getattr(other, name)]
        if one.inner_width != other.inner_width:
            changed.append("intermediate_size")
        biases = [name for name in OWN_BIASES if name != "norm_bias" or one.norm == "layer"]
        changed += [name for name in biases if one.has_bias(name) != other.has_bias(name)]
        if one.num_layers == other.num_layers and not changed:
            layers = zip(layer_attentions(one), layer_attentions(other), strict=True)
            changed += [] if all(self.computed(a) == self.computed(b) for a, b in layers) else ["mechanism"]
        return changed

    def computed(self, attention: LayerAttention) -> object:
        """A value that is equal for two layers whose attention computes the same: the spec, or the mechanism with all
        its options, defaults included. For a mechanism without a spec, `chunk` is ignored: it only sets how many tokens
        of a scan are computed at once."""
        spec = attention.mechanism.spec(attention.config)
        if spec is not None:
            usual = ScaledDot(scale=spec.heads.key_size**-0.5)
            return dataclasses.replace(spec, score=usual) if spec.score == ScaledDot() else spec
        config, heads = attention.config, attention.config.head_layout
        filled: dict[str, Any] = {"dropout": 0.0, "head_dim": heads.key_size}
        if getattr(config, "value_size", 0) is None:
            filled["value_size"] = heads.value_size
        return attention.full_name, {**_values(config), **filled, "chunk": None}


def inexpressible(fields: Mapping[str, Any], model_type: str) -> Incompatible:
    """The error for fields of a config, by name, whose values a config.json of this layout cannot describe."""
    given = ", ".join(f"{name} {value!r}" for name, value in fields.items())
    named = {"field": next(iter(fields)), "fields": ", ".join(fields)}
    return Incompatible(f"{given} cannot be expressed in a {model_type} config.json", **named)


def _values(config: Any) -> dict[str, Any]:
    """The fields of a config by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _given(config: Any, name: str) -> Any:
    """The value of a field, with a missing `num_decoder_layers` replaced by the number of decoder layers."""
    return config.decoder_layers if name == "num_decoder_layers" else getattr(config, name, None)


def needed(values: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; raises `InvalidValue` if it is missing or null."""
    value = values.get(key)
    if value is None:
        raise InvalidValue(f"{key}: is missing", field=key)
    return value


def objects_of(values: Mapping[str, Any], *keys: str) -> dict[str, Mapping[str, Any]]:
    """The objects at these keys, empty where there is none; raises `InvalidValue` for anything else."""
    found = {key: values.get(key) or {} for key in keys}
    for key, given in found.items():
        if not isinstance(given, Mapping):
            raise InvalidValue.of(key, given, "an object")
    return found


def renamed(error: InvalidValue, field: str) -> InvalidValue:
    """The same error for a field of another name."""
    _, _, rest = error.message.partition(f"{error.metadata.get('field', '')}: ")
    return InvalidValue(f"{field}: {rest or error.message}", **error.metadata | {"field": field})


FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 10_000
"""An upper bound on layers: above that of any model, and small enough to list the layers one by one."""


def required_count(values: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """The whole number at `key`; raises `InvalidValue` for any other value, or if it is missing without a default.

    Numbers of layers are limited, because objects are created for each layer before a later check could refuse it.
    """
    value = whole(needed(values, key) if default is None else values.get(key, default))
    most = MOST_LAYERS if "layer" in key else MAX_INT32
    count: int = require_whole(key, value, ge=least, le=most)
    return count


def listed_layer_types(values: Mapping[str, Any], layers: int, kinds: tuple[str, str]) -> list[str] | None:
    """The `layer_types` of a config.json; None without that key.

    Raises `InvalidValue` unless there is one of `kinds` for each of the layers.
    """
    given = values.get("layer_types")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != layers or any(kind not in kinds for kind in given):
        raise InvalidValue.of("layer_types", given, f"{kinds[0]!r} or {kinds[1]!r} for each of {layers} layers")
    return given


def layer_kinds(values: Mapping[str, Any], layers: int, kinds: tuple[str, str], period: int) -> list[str]:
    """The `layer_types` of a config.json; without that key those of one period, whose last layer is of the other kind.

    `kinds` are the usual kind and the kind of the last layer of a period. Raises as `listed_layer_types`.
    """
    given = listed_layer_types(values, layers, kinds)
    if given is not None:
        return given
    return [kinds[0]] if period > layers else [kinds[0]] * (period - 1) + [kinds[1]]


def require_allowed(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `InvalidValue` for a key of `allowed` that is present with a value other than those allowed.

    A setting of a checkpoint that the decoder does not compute is always an error, never ignored.
    """
    for key, choices in allowed.items():
        if key in values and values[key] not in choices:
            raise InvalidValue.of(key, values[key], " or ".join(dict.fromkeys(map(repr, choices))))


ACTIVATIONS: dict[str, FeedForwardKind] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# Tensors of heads on top of an encoder, as transformers names them.
HEADS = re.compile(r"^(pooler|cls|lm_head|classifier|qa_outputs|sequence_summary)\.|position_ids$")


class EncoderAdapter(Layout):
    """Translates the config.json and tensor names of a library's encoders to attn's and back; heads are not read.

    `prefix` precedes the names of the encoder's tensors in a checkpoint with a head. `known_keys` are the keys of
    config.json that `from_hf_config` reads. `pooling` is the pooling of token vectors into one vector of a text where
    the model folder does not specify it, see `SentencePooling`. `head_names` are the names in a checkpoint of modules
    of heads, by their names in ours, which are BERT's. `masked_activation` is the activation of the masked language
    model's head, by default that of the feed-forwards, `pooled_activation` that of the classifier of texts, None where
    classifiers are not read. `head_values` are values of config.json that heads need, and `head_zeros` matches
    parameters of the masked language model's head, by our names, that are zero where a checkpoint has none.
    """

    derived_names = HEADS
    keys: ClassVar[Mapping[str, str]] = KEYS | {"norm_eps": "layer_norm_eps"}
    prefix: ClassVar[str] = ""
    pooling: ClassVar[tuple[str, ...]] = ("mean",)
    head_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    masked_activation: ClassVar[str | None] = None
    pooled_activation: ClassVar[str | None] = "tanh"
    head_values: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    head_zeros: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    known_keys: ClassVar[frozenset[str]]

    def names_of_heads(self, stored: Collection[str]) -> Mapping[str, str]:  # noqa: ARG002  (most have one head)
        """The `head_names` in a checkpoint with tensors of the names `stored`."""
        return self.head_names

    def layout(self, config: Any) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """The layout with the tensor names of this encoder's checkpoints."""
        return self

    @abstractmethod
    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """Build the encoder config from a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    @abstractmethod
    def to_hf_config(self, config: Any) -> dict[str, Any]:
        """The config.json of an encoder; raises `Incompatible` naming what the layout cannot express."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """Build an encoder with random weights."""

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names without the prefix to those in the checkpoint."""
        return {name.removeprefix(self.prefix): name for name in names}
