"""A family of decoders as a description: which key of its config.json is which field, and which tensor which parameter.

A family declares names and constants; how they are read, checked and written back is here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attn_core import AttentionSpec, Window

from attn_models.adapters.base import (
    ACTIVATIONS,
    StateDictAdapter,
    StoredTensor,
    listed_layer_types,
    needed,
    require_allowed,
    required_count,
)
from attn_models.adapters.hf_config import Rope, hf_rope_parameters, read_rope
from attn_models.attention import layer_attentions
from attn_models.decoder.config import COUNTS, FLAGS, OWN_BIASES, AttentionChoice, DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"})
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
"""Fields by their keys in most config.json."""

GROUPED = SIZES | {"num_kv_heads": "num_key_value_heads"}
RMS = {"norm": "rms", "norm_eps": "rms_norm_eps"}
SILU: dict[str, str] = {"silu": "swiglu", "swish": "swiglu"}
GELUS: dict[str, str] = ACTIVATIONS
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
"""Modules, or whole names of parameters, by those of Llama's layout; those of a block within it."""

QK_NORM = {"attention.norm.query_gain": "self_attn.q_norm.weight", "attention.norm.key_gain": "self_attn.k_norm.weight"}
QKV = ("attention.query", "attention.key", "attention.value")
GATE_UP = ("feed_forward.gate", "feed_forward.up")
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


class FamilyAdapter(StateDictAdapter):
    """A family that is described by the attributes below; the methods are for what a table cannot say.

    `fields` are our fields by their keys of config.json, `defaults` what the family means by a missing key, `fixed` our
    fields that all its models share. `allowed` are keys with the only values that are computed here. `activations` are
    our words of `feed_forward` by theirs, under the key `activation_key`. `rope_base` is the base of rotary positions
    where the config.json says none; `partial_rotary` families rotate a part of each head. `mechanism` is that of every
    layer, "" for softmax with the options of `layer_options`. `reads` are further keys that methods read, `nulls` keys
    that are written where they are null: without them a default would be meant.

    `names` are their modules (or whole names) by ours, `{}` stands for an expert's number, and `fused` the modules of
    ours that lie in one of theirs, in each of `fused_groups` equal blocks. `stacked` are the matrices of all experts
    that lie in one of theirs, [experts, in, out]; their biases are called `_bias` after it. Names of a block are below
    `layers`.
    """

    architecture: ClassVar[str]
    fields: ClassVar[Mapping[str, str]] = GROUPED
    defaults: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    activation_key: ClassVar[str] = "hidden_act"
    activations: ClassVar[Mapping[str, str]] = SILU
    rope_base: ClassVar[float] = 10000.0
    partial_rotary: ClassVar[bool] = False
    mechanism: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = frozenset()
    nulls: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    layers: ClassVar[str] = "model.layers"
    names: ClassVar[Mapping[str, str]] = LLAMA_NAMES
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    derived_names = re.compile(r"rotary_emb\.inv_freq$")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        turned = ROPE_KEYS | {"partial_rotary_factor"} if cls.fixed.get("positions") == "rotary" else frozenset()
        declared = {*cls.fields.values(), *cls.defaults, *cls.allowed, *cls.reads, *turned}
        cls.known_keys = frozenset({*declared, cls.activation_key} if cls.activations else declared)
        cls.head = f"{cls.names['unembedding']}.weight"

    def __init__(self) -> None:
        self.groups: Mapping[str, int] = {}

    # What a table cannot say.

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002  (most need none)
        """Further fields of the decoder."""
        return {}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:  # noqa: ARG002  (most need none)
        """Further keys of config.json: those from which `own_fields` and `layer_options` come to what they did."""
        return {}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:  # noqa: ARG002  (most need none)
        """Options of the attention of one layer: those of the mechanism `gemma`, unless the family names another."""
        return {}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:  # noqa: ARG002  (most need none)
        """The number of blocks of a fused tensor by its name, where it is not one."""
        return {}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions of a config.json."""
        return read_rope(values, base=self.rope_base, partial=self.partial_rotary)

    def rope_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys from which `rope` reads those of the config."""
        return {"rope_parameters": hf_rope_parameters(config)}

    # How it is read and written.

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a config.json of this family."""
        values = {**self.defaults, **values}
        required_count(values, self.fields["num_layers"])
        require_allowed(values, self.allowed)
        fields: dict[str, Any] = {"num_kv_heads": None, **self.fixed}
        for ours, theirs in self.fields.items():
            if ours in (*FLAGS, *OWN_BIASES):
                fields[ours] = bool(values.get(theirs))
            elif ours in COUNTS:
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
        options = self.layer_options(values, layer)
        if self.mechanism:
            return AttentionChoice(mechanism=self.mechanism, options=options)
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
        usual = {"intermediate_size": config.inner_width, "num_kv_heads": config.num_heads}
        value = getattr(config, ours)
        return usual.get(ours) if value is None else value

    def layout(self, config: DecoderConfig) -> FamilyAdapter:
        """How the tensors of this decoder are named, and how fused ones are divided."""
        bound = copy.copy(self)
        bound.groups = self.fused_groups(config)
        return bound

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, or for those that are fused."""
        known = set(parameters)
        leading = {parts[0]: (theirs, parts) for theirs, parts in self.fused.items()}
        inner = {part for parts in self.fused.values() for part in parts[1:]}
        found = []
        for name in parameters:
            place, rest = _split_layer(name)
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
                found.append(StoredTensor(f"{prefix}{theirs}.{leaf}", parts, groups=self.groups.get(theirs, 1)))
                continue
            found.append(StoredTensor(prefix + self._their_name(rest, module, leaf), (name,)))
        return found

    def _stacked(self, name: str, prefix: str, known: Collection[str]) -> list[StoredTensor]:
        """The tensor of all experts in which the parameter `name` of the first expert comes first, if it does."""
        before, _, rest = name.partition("experts.0.")
        module, _, leaf = rest.rpartition(".")
        theirs = next((theirs for theirs, modules in self.stacked.items() if modules[0] == module), None)
        if theirs is None:
            return []
        count = len({found[0] for one in known if one.startswith(before) and (found := EXPERT.search(one))})
        parts = tuple(f"{before}experts.{n}.{one}.{leaf}" for n in range(count) for one in self.stacked[theirs])
        called, groups = theirs if leaf == "weight" else f"{theirs}_{leaf}", self.groups.get(theirs, 1)
        return [StoredTensor(prefix + called, parts, transposed=leaf == "weight", groups=groups, stacked=count)]

    def _their_name(self, rest: str, module: str, leaf: str) -> str:
        if rest in self.names:
            return self.names[rest]
        expert = EXPERT.search(module)
        if expert is None:
            return f"{self.names.get(module, module)}.{leaf}"
        named = self.names[EXPERT.sub("{}", module)].format(expert[0])
        return f"{named}.{leaf}"

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Their names; those of a model that was saved without its head lack what precedes the first point."""
        prefix, known = self.names["embedding"].partition(".")[0] + ".", list(names)
        if "." not in self.names["embedding"] or any(name.startswith(prefix) for name in known):
            return {name: name for name in known}
        return {name if name == self.head else prefix + name: name for name in known}


def _split_layer(name: str) -> tuple[str, str]:
    """The number of the block, or nothing, and the name within it."""
    if not name.startswith("blocks."):
        return "", name
    _, layer, rest = name.split(".", 2)
    return layer, rest


def listed_kinds(values: Mapping[str, Any], usual: Sequence[str]) -> Sequence[str]:
    """The `layer_types` of a config.json, `usual` where it has none.

    Raises `InvalidValue` unless there is a full or sliding one for each layer.
    """
    given = listed_layer_types(values, len(usual), (FULL, SLIDING))
    return usual if given is None else given


def kind_keys(config: DecoderConfig) -> dict[str, Any]:
    """`layer_types` and `sliding_window` of the layers of a decoder; the window is null where none has one."""
    windows = [window_of(attention.mechanism.spec(attention.config)) for attention in layer_attentions(config)]
    found = [window for window in windows if window is not None]
    kinds = [FULL if window is None else SLIDING for window in windows]
    return {"layer_types": kinds, "sliding_window": found[0] if found else None}


def window_of(spec: AttentionSpec | None) -> int | None:
    """The tokens that the layer of a spec sees; None where it sees all."""
    mask = None if spec is None else spec.mask
    return mask.left + 1 if isinstance(mask, Window) and mask.left is not None else None
