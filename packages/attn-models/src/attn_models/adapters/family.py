"""A decoder family as a description: the config.json key of each field, and the tensor of each parameter.

A family declares names and constants; `FamilyAdapter` reads, checks and writes them.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from attn_core import AttentionSpec, Window
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import OWN_BIASES, AttentionChoice, DecoderConfig
from attn_schema.schema import fields_of

from attn_models.adapters.base import (
    ACTIVATIONS,
    FULL,
    KEYS,
    SLIDING,
    StateDictAdapter,
    StoredTensor,
    listed_layer_types,
    needed,
    require_allowed,
    required_count,
    with_base_prefix,
)
from attn_models.adapters.hf_config import check_unread_keys, without_aliases
from attn_models.adapters.rope import (
    TOP_LEVEL,
    Rope,
    model_rope,
    read_rope,
    rope_keys_of_kinds,
    rope_parameters,
    ropes_of_kinds,
)
from attn_models.attention import layer_attentions

ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "original_max_position_embeddings", *TOP_LEVEL})
SIZES = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "tie_word_embeddings": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
}
"""Config fields, and their keys in most config.json files."""

GROUPED = SIZES | {"num_kv_heads": "num_key_value_heads"}
LLAMA_FIELDS = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
RMS = {"norm": "rms", "norm_eps": "rms_norm_eps"}
SILU: dict[str, str] = {"silu": "swiglu", "swish": "swiglu"}
GELUS: Mapping[str, str] = ACTIVATIONS
LLAMA_NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "unembedding": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Modules, or full parameter names, and their names in Llama's layout; those of a block are relative to the block."""

KIMI_DELTA_NAMES = {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in (
    ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj"), ("strength", "b_proj"),
    ("fade.0", "f_a_proj"), ("fade.1", "f_b_proj"), ("gate.0", "g_a_proj"), ("gate.1", "g_b_proj"),
    ("norm", "o_norm.weight"), ("rate", "A_log"), ("step_bias", "dt_bias"), ("latent_norm", "kv_a_layernorm"),
)}  # fmt: skip
"""The names of Kimi Delta Attention, and of the norm of latents in the layers beside it."""

QK_NORM = {"attention.norm.query_gain": "self_attn.q_norm.weight", "attention.norm.key_gain": "self_attn.k_norm.weight"}
NORMS_AFTER = {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}
QKV = ("attention.query", "attention.key", "attention.value")
GATE_UP = ("feed_forward.gate", "feed_forward.up")
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


class BlockNames(NamedTuple):
    """The `names` and `fused` tensors of some blocks, besides and in place of those of all blocks."""

    names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class FamilyAdapter(StateDictAdapter):
    """A decoder family that is described by the attributes below; the methods are for what a table cannot express.

    `fields` maps config fields to keys of config.json, `defaults` holds the values of missing keys, `fixed` the fields
    that all models of the family share. `allowed` lists, by key, the only values that are supported. `activations` maps
    values of `activation_key` to values of `feed_forward`. `rope_base` and `rotary_fraction` are the base and the
    rotated part of each head where the config.json gives none; the fraction is None where whole heads are rotated, and
    `rope_keys_outside` holds their keys outside `rope_parameters`. Families with rotary positions for each kind of
    layer have `ropes` instead, see `ropes_of_kinds`. `mechanism` is that of every layer, "" for softmax attention with
    the options of `layer_options`. `reads` are further keys that methods read, `option_keys` those of options, for
    errors, `nulls` keys that are written even where they are null, as their default would apply otherwise. A family
    whose layers have different mechanisms overrides `layer_mechanism`.

    `names` maps modules (or full parameter names) to those of the checkpoint, where `{}` stands for an expert's number.
    `fused` lists, by checkpoint tensor, the modules that are concatenated in it, within each of `fused_groups` equal
    blocks. `kinds` has the names of blocks that have a parameter, by its name in a block, for families with several
    kinds of layers. Parameters that match `centred` are stored minus 1; those of a block or the model that match
    `float32` stay in it, those that match `transposed` are stored as [in, out]; the tensors of those that match
    `depthwise` have the shape of the filters of a depthwise `Conv1d`. `split_rows` and `stored_shapes` return the
    parameters of a block that are stored in several tensors, or in another shape. `stacked` lists the matrices of all
    experts that are stored in one tensor, [experts, in, out], or [experts, out, in] unless `stacked_transposed`; the
    tensor of their biases has the same name with `_bias` appended.
    Names of a block are below `layers`.
    """

    architecture: ClassVar[str]
    fields: ClassVar[Mapping[str, str]] = GROUPED
    defaults: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    activation_key: ClassVar[str] = "hidden_act"
    activations: ClassVar[Mapping[str, str]] = SILU
    rope_base: ClassVar[float] = 10000.0
    rotary_fraction: ClassVar[float | None] = None
    ropes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    rope_bases: ClassVar[Mapping[str, str]] = {}
    rope_keys_outside: ClassVar[Mapping[str, str]] = TOP_LEVEL
    mechanism: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = frozenset()
    option_keys: ClassVar[Mapping[str, str]] = {}
    nulls: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    layers: ClassVar[str] = "model.layers"
    names: ClassVar[Mapping[str, str]] = LLAMA_NAMES
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    kinds: ClassVar[Mapping[str, BlockNames]] = {}
    centred: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    depthwise: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    float32: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    transposed: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    stacked_transposed: ClassVar[bool] = True
    derived_names = re.compile(r"rotary_emb\.inv_freq$")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rotary_keys = ROPE_KEYS.union(cls.rope_keys_outside.values()) if cls.fixed.get("positions") == "rotary" else ()
        declared = {*cls.fields.values(), *cls.defaults, *cls.allowed, *cls.reads, *rotary_keys}
        cls.known_keys = frozenset({*declared, cls.activation_key} if cls.activations else declared)
        cls.head = f"{cls.names['unembedding']}.weight"
        width = {"inner_width": cls.fields.get("intermediate_size", "intermediate_size")}
        cls.keys = KEYS | width | dict(cls.fields) | dict(cls.option_keys)

    def __init__(self) -> None:
        self.groups: Mapping[str, int] = {}
        self.splits: Mapping[str, Mapping[str, int]] = {}
        self.shapes: Mapping[str, tuple[int, ...]] = {}

    # Methods for what a table cannot express.

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002  (most need none)
        """Further fields of the decoder config."""
        return {}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """Further keys of config.json: those from which `own_fields` and `layer_options` recover their results.

        By default the kind of each layer and the window, for families that read `layer_types`.
        """
        return kind_keys(config) if "layer_types" in self.reads else {}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:  # noqa: ARG002  (most need none)
        """Options of the attention of one layer, for the family's `mechanism` or, where it has none, for `gemma`."""
        return {}

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:  # noqa: ARG002  (most have but one)
        """The mechanism of one layer; "" for softmax attention with its `layer_options`."""
        return self.mechanism

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:  # noqa: ARG002  (most need none)
        """The number of blocks of a fused tensor, by its name, where it is not one."""
        return {}

    def split_rows(self, config: DecoderConfig) -> dict[str, dict[str, int]]:  # noqa: ARG002  (most need none)
        """By parameter of a block, the tensors that hold its rows, in order, with their numbers."""
        return {}

    def stored_shapes(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:  # noqa: ARG002  (most need none)
        """By parameter of a block, the shape of its tensor where it is another."""
        return {}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions of a config.json, or those of its first kind of layers."""
        if self.ropes:
            return ropes_of_kinds(values, self.ropes, self.rope_bases)[next(iter(self.ropes))]
        return read_rope(values, self.rope_base, self.rotary_fraction, self.rope_keys_outside)

    def kind_options(self, values: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """The window of a layer of this kind, and its rotary positions where they are not the model's."""
        options: dict[str, Any] = {"window": required_count(values, "sliding_window")} if kind == SLIDING else {}
        found = ropes_of_kinds(values, self.ropes, self.rope_bases) if self.ropes else {}
        own = found.get(kind)
        return options if own is None or own == self.rope(values) else options | {"rotary": dataclasses.asdict(own)}

    def rope_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys from which `rope` reads the rotary positions of the config."""
        if self.ropes:
            return rope_keys_of_kinds(config, self.ropes)
        return {"rope_parameters": rope_parameters(model_rope(config))}

    # Reading and writing.

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a config.json of this family."""
        values = {**self.defaults, **values}
        required_count(values, self.fields["num_layers"])
        require_allowed(values, self.allowed)
        fields: dict[str, Any] = {"num_kv_heads": None, **self.fixed}
        known = {info.name: info for info in fields_of(self.Config)}
        for ours, theirs in self.fields.items():
            info = known[ours]
            if info.kind is bool:
                fields[ours] = bool(values.get(theirs))
            elif info.required or ours == "norm_eps":
                fields[ours] = needed(values, theirs)
            elif values.get(theirs) is not None:
                fields[ours] = values[theirs]
        if self.activations:
            require_allowed(values, {self.activation_key: tuple(self.activations)})
            fields["feed_forward"] = self.activations[needed(values, self.activation_key)]
        if fields["positions"] == "rotary":
            rope = self.rope(values)
            fields |= {"rope_theta": rope.base, "partial_rotary_factor": rope.fraction, "rope_scaling": rope.scaling}
        fields |= self.own_fields(values)
        choices = [self._choice(values, fields, layer) for layer in range(required_count(fields, "num_layers"))]
        first = choices[0]
        pattern = () if all(choice == first for choice in choices) else tuple(choices)
        choice = {"mechanism": first.mechanism, "options": first.options, "pattern": pattern}
        decoder: DecoderConfig = self.Config(**fields, **choice)
        return decoder

    def _choice(self, values: Mapping[str, Any], fields: Mapping[str, Any], layer: int) -> AttentionChoice:
        options, mechanism = self.layer_options(values, layer), self.layer_mechanism(values, layer)
        if mechanism:
            return AttentionChoice(mechanism=mechanism, options=options)
        if options.keys() - {"rotary"}:
            return AttentionChoice(mechanism="attn-variants/gemma", options={"norm_eps": None} | options)
        shared = fields["num_kv_heads"] not in (None, fields["num_heads"])
        return AttentionChoice(mechanism="attn-variants/gqa" if shared else "attn-variants/mha", options=options)

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """See `StateDictAdapter`."""
        values: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        values |= {theirs: self._plain(config, ours) for ours, theirs in self.fields.items()}
        words = [theirs for theirs, ours in self.activations.items() if ours == config.feed_forward]
        if self.activations:
            values[self.activation_key] = words[0] if words else config.feed_forward
        if self.fixed.get("positions") == "rotary":
            values |= self.rope_keys(config)
        values |= self.own_keys(config)
        return {key: value for key, value in values.items() if value is not None or key in self.nulls}

    def _plain(self, config: DecoderConfig, ours: str) -> Any:
        if ours in OWN_BIASES:
            return config.has_bias(ours)
        value = getattr(config, ours)
        if ours == "head_dim" and value is None:
            return config.hidden_size // config.num_heads
        usual = {"intermediate_size": config.inner_width, "num_kv_heads": config.num_heads}
        return usual.get(ours) if value is None else value

    def layout(self, config: DecoderConfig) -> FamilyAdapter:
        """The layout with the tensor names of this decoder's checkpoints and the blocks of fused tensors."""
        bound = copy.copy(self)
        bound.groups = self.fused_groups(config)
        bound.splits, bound.shapes = self.split_rows(config), self.stored_shapes(config)
        return bound

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, or for each group of fused or stacked parameters."""
        known, kinds = set(parameters), self._kinds_of_blocks(parameters)
        found = []
        for name in parameters:
            place, rest = _split_layer(name)
            own = kinds.get(place, BlockNames(self.names, self.fused))
            leading = {parts[0]: (theirs, parts) for theirs, parts in own.fused.items()}
            inner = {part for parts in own.fused.values() for part in parts[1:]}
            prefix = f"{self.layers}.{place}." if place else ""
            block = f"blocks.{place}." if place else ""
            module, _, leaf = rest.rpartition(".")
            expert = EXPERT.search(module)
            if expert is not None and self.stacked:
                found += self._stacked(name, prefix, known) if int(expert[0]) == 0 else []
                continue
            if module in inner:
                continue
            if module in leading:
                theirs, modules = leading[module]
                parts = tuple(part for part in (f"{block}{one}.{leaf}" for one in modules) if part in known)
                turned, groups = bool(self.transposed.search(rest)), self.groups.get(theirs, 1)
                found.append(StoredTensor(f"{prefix}{theirs}.{leaf}", parts, turned, groups=groups))
                continue
            whole = StoredTensor(
                prefix + _their_name(own.names, rest, module, leaf),
                (name,),
                transposed=bool(self.transposed.search(rest)),
                offset=1.0 if self.centred.search(name) else 0.0,
                depthwise=bool(self.depthwise.search(name)),
                float32=bool(self.float32.search(rest)),
                shape=self.shapes.get(rest),
            )
            start, tensors = 0, self.splits.get(rest, {})
            for theirs, rows in tensors.items():
                found.append(dataclasses.replace(whole, name=prefix + theirs, rows=(start, start + rows)))
                start += rows
            found += [] if tensors else [whole]
        return found

    def _kinds_of_blocks(self, parameters: Sequence[str]) -> dict[str, BlockNames]:
        """The names of the blocks, by their number, that have a parameter of one of `kinds`."""
        marked = [(place, self.kinds[rest]) for place, rest in map(_split_layer, parameters) if rest in self.kinds]
        return {place: BlockNames({**self.names, **kind.names}, kind.fused) for place, kind in marked}

    def _stacked(self, name: str, prefix: str, known: Collection[str]) -> list[StoredTensor]:
        """The stacked tensor that begins with the parameter `name` of the first expert, if there is one."""
        before, _, rest = name.partition("experts.0.")
        module, _, leaf = rest.rpartition(".")
        theirs = next((theirs for theirs, modules in self.stacked.items() if modules[0] == module), None)
        if theirs is None:
            return []
        count = len({found[0] for one in known if one.startswith(before) and (found := EXPERT.search(one))})
        parts = tuple(f"{before}experts.{n}.{one}.{leaf}" for n in range(count) for one in self.stacked[theirs])
        called, groups = theirs if leaf == "weight" else f"{theirs}_{leaf}", self.groups.get(theirs, 1)
        return [
            StoredTensor(
                prefix + called,
                parts,
                transposed=self.stacked_transposed and leaf == "weight",
                groups=groups,
                stacked=count,
            )
        ]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """See `with_base_prefix`."""
        return with_base_prefix(names, self.names["embedding"], self.head)


def _their_name(names: Mapping[str, str], rest: str, module: str, leaf: str) -> str:
    if rest in names:
        return names[rest]
    expert = EXPERT.search(module)
    if expert is None:
        return f"{names.get(module, module)}.{leaf}"
    named = names[EXPERT.sub("{}", module)].format(expert[0])
    return f"{named}.{leaf}"


def _split_layer(name: str) -> tuple[str, str]:
    """The number of the block, or "" outside blocks, and the name within the block."""
    if not name.startswith("blocks."):
        return "", name
    _, layer, rest = name.split(".", 2)
    return layer, rest


class TextOfVisionModel(FamilyAdapter):
    """The text model in published checkpoints of a model that also reads images, which are not read; a base class in
    front of `text`, the adapter of checkpoints that hold the text model alone, as which models are written.

    `outer` are the keys beside `text_config` that hold for the text model, too.
    """

    text: ClassVar[type[FamilyAdapter]]
    outer: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from the `text_config`."""
        text = needed(values, "text_config")
        if not isinstance(text, Mapping):
            raise InvalidValue.of("text_config", text, f"an object with the keys of a {self.text.model_type}")
        text = without_aliases(text, self.text.aliases)
        check_unread_keys(text, self.text.known_keys, Path("config.json"))
        return super().from_hf_config({**text, **{key: values[key] for key in self.outer if key in values}})

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:  # noqa: ARG002 -- none can be
        """Always raises `Incompatible`, as there is no vision model to write."""
        written = self.text.model_type
        raise Incompatible(f"a text model is written as {written}, not as {self.model_type}, which has a vision model")

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """The names as they are."""
        return {name: name for name in names}


def dense_first(kinds: Any, layers: int) -> int:
    """The number of dense layers in `mlp_layer_types`; raises `InvalidValue` unless they are the first of `layers`."""
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        allowed = f"'dense' or 'sparse' for each of {layers} layers, dense ones first"
        raise InvalidValue.of("mlp_layer_types", kinds, allowed)
    return dense


def shared_experts(values: Mapping[str, Any], key: str, width_key: str) -> int:
    """The shared expert of the width `key` as a number of experts of the width `width_key`; raises `InvalidValue`."""
    width, shared = required_count(values, width_key), required_count(values, key)
    if shared % width:
        raise InvalidValue.of(key, shared, f"a multiple of the {width_key} {width}")
    return shared // width


def listed_kinds(values: Mapping[str, Any], usual: Sequence[str]) -> Sequence[str]:
    """The `layer_types` of a config.json; `usual` where it has none.

    Raises `InvalidValue` unless there is a full or sliding one for each layer.
    """
    given = listed_layer_types(values, len(usual), (FULL, SLIDING))
    return usual if given is None else given


def periodic_kinds(values: Mapping[str, Any], period: int) -> Sequence[str]:
    """The `layer_types` of a config.json; where it has none, every `period`-th layer is full, the others are sliding.

    Raises as `listed_kinds`.
    """
    layers = range(required_count(values, "num_hidden_layers"))
    return listed_kinds(values, [SLIDING if (layer + 1) % period else FULL for layer in layers])


def kind_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys `layer_types` and `sliding_window` for a decoder's layers; the window is null where no layer has one."""
    windows = [window_of(attention.mechanism.spec(attention.config)) for attention in layer_attentions(config)]
    found = [window for window in windows if window is not None]
    kinds = [FULL if window is None else SLIDING for window in windows]
    return {"layer_types": kinds, "sliding_window": found[0] if found else None}


def window_of(spec: AttentionSpec | None) -> int | None:
    """The number of tokens in the sliding window of a spec, the query's own included; None without a window."""
    mask = None if spec is None else spec.mask
    return mask.left + 1 if isinstance(mask, Window) and mask.left is not None else None
