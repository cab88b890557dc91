"""State dict adapters: the one place that knows the config keys and tensor names of another library."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from attn_core.errors import Incompatible, InvalidValue
from attn_core.scores import ScaledDot

from attn_models.attention import LayerAttention, layer_attentions
from attn_models.decoder.config import OWN_BIASES, DecoderConfig
from attn_models.plain_config import whole


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and the parameters of our model that it holds.

    `parameters` lie one after the other along the first axis, in each of `groups` equal blocks of it (such as heads).
    ours = (theirs, its two axes exchanged if `transposed`) * `scale` + `offset`. `float32` keeps that type whatever
    the type of the weights. `depthwise` tensors have a second axis of size one, as filters of `torch.nn.Conv1d` with a
    group for each channel. A tensor that is `stacked` has a first axis of this length, for equal shares of `parameters`
    in order, such as those of each expert; what is said above holds for each place of it.
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

    def shares(self) -> list[StoredTensor]:
        """What lies at each place of a stacked tensor; the tensor itself, if it is not stacked."""
        if not self.stacked:
            return [self]
        each = len(self.parameters) // self.stacked
        parts = [self.parameters[place * each : (place + 1) * each] for place in range(self.stacked)]
        return [dataclasses.replace(self, parameters=part, stacked=0) for part in parts]


class Layout(ABC):
    """How the tensors of a kind of checkpoint are named. `model_type` is that of its config.json.

    `head` is its name of the unembedding, which may be there although it is tied to our parameter `embedding`.
    Tensors whose names match `derived_names` are skipped: they follow from the config, such as causal masks in older
    checkpoints, or are unused. `copies` are other names of tensors, which must be equal where both are there.
    Parameters of ours whose names match `zeros` are in no checkpoint and are zero: biases that change nothing, whatever
    they are. Those whose names match `ones` are in none and are one, such as the gains of norms without gains.
    """

    model_type: ClassVar[str]
    head: ClassVar[str] = ""
    embedding: ClassVar[str] = "embedding.weight"
    copies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    derived_names: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    zeros: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    ones: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")

    @property
    def name(self) -> str:
        """What the layout is called among those that are installed: its `model_type`."""
        return self.model_type

    @abstractmethod
    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """The tensors of a checkpoint of a model with these parameters."""

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """The checkpoint's names of its tensors, by the names that `tensor_mappings` uses."""
        return {name: name for name in names}

    def stored(self, parameters: Iterable[str]) -> list[StoredTensor]:
        """The tensors of a checkpoint of a model with these parameters, without those that are constant."""
        return self.tensor_mappings([name for name in parameters if self.constant(name) is None])

    def constant(self, name: str) -> float | None:
        """What every element of a parameter is that no checkpoint holds; None for any other parameter."""
        patterns = {0.0: self.zeros, 1.0: self.ones}
        return next((value for value, pattern in patterns.items() if pattern.search(name)), None)

    def is_derived(self, name: str) -> bool:
        """Whether a tensor of this name is skipped: it follows from the config or is not used."""
        return bool(self.derived_names.search(name))


ATTENTION = ("mechanism", "options", "pattern")
ROTARY = ("rope_theta", "partial_rotary_factor", "rope_interleave", "rope_scaling")
SKIPPED = (*ATTENTION, *ROTARY, *OWN_BIASES, "bias", "num_kv_heads", "head_dim", "intermediate_size")
"""Fields that are compared by what follows from them; rotary positions are part of each layer's attention."""
TRAINED = (
    "dropout",
    "attention_dropout",
    "router_aux_loss_coef",
    "router_bias_update_rate",
    "nextn_predict_loss_weight",
)
"""Fields that only training reads, which no config.json need say."""


class StateDictAdapter(Layout):
    """Translates config.json and tensor names of a library's decoders to ours and back.

    `known_keys` are the keys of config.json that `from_hf_config` reads. Configs are of the class `Config`: the general
    decoder's, or that of a family with a model of its own, which `build` builds (see docs/model-families.md).
    `by_tensors` are fields that follow from which tensors a checkpoint has, see `without_missing`.
    """

    known_keys: ClassVar[frozenset[str]]
    by_tensors: ClassVar[frozenset[str]] = frozenset()
    Config: ClassVar[type[Any]] = DecoderConfig

    def build(self, config: Any) -> Any:
        """A fresh `attn_core.models.LanguageModel` with random weights, whose attribute `config` is the one given."""
        from attn_models.decoder.decoder import Decoder

        return Decoder(config)

    def layout(self, config: Any) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """How the tensors of this decoder are named."""
        return self

    @abstractmethod
    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """The decoder of a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    def without_missing(self, config: Any, names: Iterable[str]) -> Any:  # noqa: ARG002  (few leave out)
        """The config without modules that its config.json has but for which there are no tensors among `names`."""
        return config

    @abstractmethod
    def keys_of(self, config: Any) -> dict[str, Any]:
        """The keys of config.json that say a decoder; `to_hf_config` checks that they say all of it."""

    def to_hf_config(self, config: Any) -> dict[str, Any]:
        """The config.json of a decoder; raises `Incompatible` naming what the layout cannot express.

        It is read again: whatever an adapter left out is refused here, by the name of the field.
        """
        try:
            values = self.keys_of(config)
            again = self.from_hf_config(values)
        except InvalidValue as error:
            message = f"this decoder cannot be expressed in a {self.model_type} config.json: {error.message}"
            raise Incompatible(message, **error.metadata) from error
        changed = self.difference(again, config)
        if changed is not None:
            given = getattr(config, changed, None)
            message = f"{changed} {given!r} cannot be expressed in a {self.model_type} config.json"
            raise Incompatible(message, field=changed)
        return values

    def difference(self, one: Any, other: Any) -> str | None:
        """The first field by which two models differ in what they compute; None where there is none."""
        skipped = {*TRAINED, *self.by_tensors}
        if not isinstance(one, DecoderConfig) or not isinstance(other, DecoderConfig):
            names = (item.name for item in dataclasses.fields(one) if item.name not in skipped)
            return next((name for name in names if _given(one, name) != _given(other, name)), None)
        for name in one.plain():
            if name not in (*SKIPPED, *skipped) and getattr(one, name) != getattr(other, name):
                return name
        if one.inner_width != other.inner_width:
            return "intermediate_size"
        biases = [name for name in OWN_BIASES if name != "norm_bias" or one.norm == "layer"]
        changed = next((name for name in biases if one.has_bias(name) != other.has_bias(name)), None)
        if changed is not None:
            return changed
        layers = zip(layer_attentions(one), layer_attentions(other), strict=True)
        return None if all(self.computed(a) == self.computed(b) for a, b in layers) else "mechanism"

    def computed(self, attention: LayerAttention) -> object:
        """What tells a layer's attention from another's: its spec, or its mechanism with all options, what is left out
        filled in. Of a mechanism without a spec `chunk` is how many tokens of a scan are computed together."""
        spec = attention.mechanism.spec(attention.config)
        if spec is not None:
            usual = ScaledDot(scale=spec.heads.key_size**-0.5)
            return dataclasses.replace(spec, score=usual) if spec.score == ScaledDot() else spec
        config, heads = attention.config, attention.config.head_layout
        filled: dict[str, Any] = {"dropout": 0.0, "head_dim": heads.key_size}
        if getattr(config, "value_size", 0) is None:
            filled["value_size"] = heads.value_size
        return attention.full_name, {**_values(config), **filled, "chunk": None}


def _values(config: Any) -> dict[str, Any]:
    """The fields of a config by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _given(config: Any, name: str) -> Any:
    """The value of a field, or the one that stands for a field left out."""
    return config.decoder_layers if name == "num_decoder_layers" else getattr(config, name, None)


def needed(values: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; raises `InvalidValue` if it is missing or null."""
    value = values.get(key)
    if value is None:
        raise InvalidValue(f"{key}: is missing", field=key)
    return value


MOST_LAYERS = 10_000
"""More than any model has, and few enough to be listed one by one."""


def required_count(values: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """The whole number at `key`; raises `InvalidValue` for any other value, or if it is missing without a default.

    Layers are bounded: something is made for each of them before anything else could refuse their number.
    """
    value = whole(needed(values, key) if default is None else values.get(key, default))
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue.of(key, value, f"a whole number from {least}")
    if "layer" in key and value > MOST_LAYERS:
        raise InvalidValue.of(key, value, f"a whole number from {least} to {MOST_LAYERS}")
    return value


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
    """The `layer_types` of a config.json; without that key those of one period, whose last layer is of another type.

    `kinds` are the usual type and that of the last layer of a period. Raises as `listed_layer_types`.
    """
    given = listed_layer_types(values, layers, kinds)
    if given is not None:
        return given
    return [kinds[0]] if period > layers else [kinds[0]] * (period - 1) + [kinds[1]]


def require_allowed(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `InvalidValue` for a key of `allowed` whose value is given and not one of those allowed.

    What a checkpoint asks for and the decoder does not compute is an error, never ignored.
    """
    for key, choices in allowed.items():
        if key in values and values[key] not in choices:
            raise InvalidValue.of(key, values[key], " or ".join(repr(choice) for choice in choices))


ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
# Heads on top of an encoder, as transformers names them.
HEADS = re.compile(r"^(pooler|cls|lm_head|classifier|qa_outputs|sequence_summary)\.|position_ids$")


class EncoderAdapter(Layout):
    """Translates config.json and tensor names of a library's encoders to ours and back; heads are not read.

    `prefix` is that of the encoder's tensors in a checkpoint with a head. `known_keys` are the keys of config.json that
    `from_hf_config` reads. `pooling` makes one vector of the rows of a text where a folder says nothing of it, as
    `SentencePooling`.
    """

    derived_names = HEADS
    prefix: ClassVar[str] = ""
    pooling: ClassVar[tuple[str, ...]] = ("mean",)
    known_keys: ClassVar[frozenset[str]]

    def layout(self, config: Any) -> Layout:  # noqa: ARG002  (names of some depend on it)
        """How the tensors of this encoder are named."""
        return self

    @abstractmethod
    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """The encoder of a config.json; raises `InvalidValue` or `Incompatible` naming the key."""

    @abstractmethod
    def to_hf_config(self, config: Any) -> dict[str, Any]:
        """The config.json of an encoder; raises `Incompatible` naming what the layout cannot express."""

    @abstractmethod
    def build(self, config: Any) -> Any:
        """A fresh encoder."""

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """The names without the prefix."""
        return {name.removeprefix(self.prefix): name for name in names}
