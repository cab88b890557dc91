"""Decoder families in GGUF that are read with the gguf library's table of tensor names.

The changes that llama.cpp's converters make besides renaming are undone: the rows of rotary pairs are next to each
other in Llama's relatives, fused projections hold all queries, then all keys, then all values, experts are stacked in
one tensor, and the matrices of GPT-2, which are [in, out] in Hugging Face's folders, are [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue

from attn_models.adapters.base import FULL, SLIDING
from attn_models.weights.gguf_architectures import (
    GgufArchitecture,
    Part,
    Placement,
    count_or,
    layer_count,
    vocabulary_size,
)
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.gguf_rope import rope_parameters, shortest_float32

FIELDS = {
    "max_seq_len": "context_length",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
}
"""Decoder fields, and their keys in a header; where a file lacks the key, the family's default is used."""

NORMS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
BIASED = {"bias": ("attn_q", "attn_qkv"), "attention_bias": ("attn_q", "attn_qkv"), "feed_forward_bias": ("ffn_up",)}
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight$")
EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
WITHOUT_ROTARY = ("bert", "bloom", "gpt2", "gpt_bigcode", "mpt")
"""Families without rotary positions."""
Keys = dict[str, Any]


def no_keys(header: GgufHeader) -> Keys:  # noqa: ARG001  (most say nothing more)
    """No further keys."""
    return {}


def find_by_name(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:  # noqa: ARG001
    """None: the tensor is found by its name."""
    return None


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family of `attn_models.adapters`, given by its `model_type`, in GGUF files of the architecture `name`.

    `own` returns keys of config.json beyond the common ones; `named` maps decoder fields to keys of config.json where
    the adapter has no such table. `described` returns the whole config.json where the common keys have another meaning.
    `placed` returns the placement of a Hugging Face tensor from its name and shape, or None to find it by its name. In
    files of `permuted` families the rows of a rotary pair are next to each other. `read` and `passed` are as in
    `GgufArchitecture`. `tensors` are names of tensors that the gguf library lacks or spells otherwise: those of a file,
    by those of Hugging Face, of layers behind `blk.N.` and `layers.N.`; `ssm_a` holds decays. `relatives` are other
    families whose models such files may hold.
    """

    name: str
    model_type: str
    own: Callable[[GgufHeader], Keys] = no_keys
    permuted: bool = False
    read: frozenset[str] = frozenset()
    passed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    described: Callable[[GgufHeader], Keys] | None = None
    placed: Callable[[GgufHeader, Keys, str, tuple[int, ...]], Placement | None] = find_by_name
    relatives: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)

    def config(self, header: GgufHeader) -> Keys:
        """The config.json of a header; raises as the `config` of other architectures."""
        if self.described is not None:
            return self.described(header)
        fields = self._fields()
        values: Keys = {
            "vocab_size": vocabulary_size(header),
            "num_layers": layer_count(header),
            "tie_word_embeddings": "output.weight" not in header.tensors,
        }
        for ours, key in FIELDS.items():
            if ours in fields and f"{self.name}.{key}" in header.metadata:
                values[ours] = header.count(f"{self.name}.{key}")
        heads, size = self._heads(header)
        shared = self._shared(header, heads)
        values |= {ours: value for ours, value in (("num_kv_heads", shared), ("head_dim", size)) if ours in fields}
        for ours, parts in BIASED.items():
            if ours in fields:
                values[ours] = any(f"blk.0.{part}.bias" in header.tensors for part in parts)
        key = next((key for key in NORMS if f"{self.name}.{key}" in header.metadata), NORMS[0])
        values["norm_eps"] = shortest_float32(header.number(f"{self.name}.{key}"))
        config = {fields[ours]: value for ours, value in values.items()}
        return {"model_type": self.model_type, **config, **self._rope(header), **self.own(header)}

    def placements(self, header: GgufHeader, config: Keys) -> list[Placement]:
        """The placement of every tensor of a model with this config."""
        from attn_models.adapters.state_dict import init_empty_weights, saved_parameters, stored_shape

        adapter: Any = installed().adapters.get(config["model_type"])
        try:
            decoder = adapter.from_hf_config(config)
        except InvalidValue as error:
            what = error.metadata.get("field", "")
            raise Incompatible(f"{header.path}: {error.message}", path=header.path, what=what) from error
        if "tie_word_embeddings" in getattr(adapter, "by_tensors", ()):
            decoder = adapter.without_missing(decoder, ["lm_head.weight"] if "output.weight" in header.tensors else [])
        with init_empty_weights():
            model = adapter.build(decoder)
        shapes = {name: tuple(tensor.shape) for name, tensor in saved_parameters(model).items()}
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        architecture = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == self.name)
        names = get_tensor_name_map(architecture, decoder.num_layers)
        layout, found = adapter.layout(decoder), []
        for item in layout.stored(shapes):
            theirs, shape = item.name, stored_shape(item, shapes)
            own = self.placed(header, config, theirs, shape)
            if own is not None:
                found.append(own)
                continue
            if item.stacked:
                found.append(_stacked(header, theirs, shape, transposed=item.transposed))
                continue
            source, expert = self._source(theirs, names.get_name)
            if source is None:
                raise Incompatible(
                    f"{header.path}: GGUF files of {self.name} have no name for the tensor {theirs!r}", path=header.path
                )
            shared = getattr(decoder, "num_kv_heads", None) or decoder.num_heads
            rotary_heads = {"attn_q": decoder.num_heads, "attn_k": shared}
            heads = rotary_heads.get(source.split(".")[-2], 0) if self.permuted else 0
            fused = _fused(source, decoder) if item.groups > 1 else ()
            placement = Placement(
                source, theirs, shape, rotary_heads=heads, fused=fused, groups=item.groups, expert=expert
            )
            if item.depthwise:
                placement = replace(placement, parts=(Part(source, (shape[0], shape[-1])),))
            # GGUF stores the gain of a norm where Hugging Face stores the gain minus one.
            placement = replace(placement, transposed=item.transposed, subtracted=item.offset)
            found.append(replace(placement, decay=source.endswith(".ssm_a")))
        return found

    def _fields(self) -> Mapping[str, str]:
        from attn_models.adapters.family import LLAMA_FIELDS, FamilyAdapter
        from attn_models.adapters.registry import decoder_adapter

        if self.named:
            return self.named
        adapter = decoder_adapter(self.model_type)
        return adapter.fields if isinstance(adapter, FamilyAdapter) else LLAMA_FIELDS

    def _heads(self, header: GgufHeader) -> tuple[int, int]:
        """The number of heads and the head size, which must be the same for keys and values."""
        heads, width = header.count(f"{self.name}.attention.head_count"), header.count(f"{self.name}.embedding_length")
        shared = self._shared(header, heads)
        if heads % shared or heads > width:
            rule = f"{heads} query heads for {shared} key/value heads and a width of {width}"
            raise CheckpointInvalid.of(header.path, rule)
        size = count_or(header, f"{self.name}.attention.key_length", width // heads)
        if count_or(header, f"{self.name}.attention.value_length", size) != size:
            rule = f"value heads that differ in size from the key heads are not supported for {self.name}"
            raise Incompatible(f"{header.path}: {rule}", path=header.path, what="attention.value_length")
        return heads, size

    def _shared(self, header: GgufHeader, heads: int) -> int:
        """The number of key/value heads of layers that have them: of hybrids there is a number for each layer."""
        key = f"{self.name}.attention.head_count_kv"
        if not isinstance(header.metadata.get(key), tuple):
            return count_or(header, key, heads)
        found = set(header.integers(key)) - {0}
        if len(found) != 1 or min(found) < 1:
            raise Incompatible(f"{header.path}: {key} is {sorted(found)}; needed: one number besides 0", what=key)
        return found.pop()

    def architecture(self) -> GgufArchitecture:
        """The `GgufArchitecture` that reads files of this family."""
        families = frozenset({self.model_type, *self.relatives})
        return GgufArchitecture(self.name, self.config, self.placements, self.read, self.passed, families)

    def _source(self, theirs: str, named: Callable[..., str | None]) -> tuple[str | None, int | None]:
        """The GGUF name of a Hugging Face tensor, and the expert's index if it belongs to an expert."""
        expert, layer = EXPERT.search(theirs), LAYER.search(theirs)
        if layer is not None and layer[2] in self.tensors:
            return f"blk.{layer[1]}.{self.tensors[layer[2]]}", None
        if expert is not None:
            part = EXPERT_PARTS.get(expert[2], expert[2].removesuffix("_proj"))
            return f"blk.{layer[1] if layer else ''}.ffn_{part}_exps.weight", int(expert[1])
        # For some families, converters remove this prefix before looking up a name.
        tried = (
            named(name, try_suffixes=(".weight", ".bias")) for name in (theirs, theirs.removeprefix("transformer."))
        )
        return next((found for found in tried if found is not None), None), None

    def _rope(self, header: GgufHeader) -> Keys:
        if f"{self.name}.rope.freq_base" not in header.metadata and self.model_type in WITHOUT_ROTARY:
            return {}
        rope = rope_parameters(header, self.name)
        _, size = self._heads(header)
        rotary_size = count_or(header, f"{self.name}.rope.dimension_count", size)
        if rotary_size != size:
            rope["partial_rotary_factor"] = rotary_size / size
        return {"rope_parameters": rope}


LAYER = re.compile(r"layers\.(\d+)\.(.*)")


def _stacked(header: GgufHeader, theirs: str, shape: tuple[int, ...], *, transposed: bool) -> Placement:
    """A matrix of all experts, or gates and ups one after the other, which files have apart or together."""
    layer, axes = LAYER.search(theirs), (0, 2, 1) if transposed else ()
    block, (rows, columns) = f"blk.{layer[1] if layer else ''}.ffn_", shape[:0:-1] if transposed else shape[1:]
    together = "down" if theirs.endswith("down_proj") else "gate_up"
    apart = ("gate", "up") if together == "gate_up" and f"{block}gate_up_exps.weight" not in header.tensors else ()
    parts = tuple(
        Part(f"{block}{word}_exps.weight", (shape[0], rows // max(len(apart), 1), columns), axes)
        for word in apart or (together,)
    )
    return Placement(parts[0].source, theirs, shape, parts=parts, axis=2 if transposed else 1)


def _fused(source: str, decoder: Any) -> tuple[int, ...]:
    """The numbers of rows of queries, keys and values in a fused projection."""
    if source.split(".")[-2] != "attn_qkv":
        return ()
    size = decoder.head_dim or decoder.hidden_size // decoder.num_heads
    shared = (decoder.num_kv_heads or decoder.num_heads) * size
    return decoder.num_heads * size, shared, shared


def number(header: GgufHeader, key: str) -> float:
    """The number under `key`, as the shortest decimal of the file's float32."""
    return shortest_float32(header.number(key))


def experts(header: GgufHeader, counted: str = "num_experts", width: str = "moe_intermediate_size") -> Keys:
    """The numbers of experts, all (under the key `counted`) and those of a token, and the `width` of one.

    Raises CheckpointInvalid if the file has another number of experts than it says.
    """
    name = header.text("general.architecture")
    count, stacked = header.count(f"{name}.expert_count"), first_tensor(header, "ffn_down_exps")
    if stacked[0] != count or len(stacked) != STACK:
        rule = f"{count} experts, but a tensor 'ffn_down_exps' of shape {list(stacked)}"
        raise CheckpointInvalid.of(header.path, rule)
    return {
        counted: count,
        "num_experts_per_tok": header.count(f"{name}.expert_used_count"),
        width: stacked[2],
    }


def layer_kinds(header: GgufHeader, period: int, *, first_full: bool = False) -> list[str]:
    """The kind of each layer: as the file lists them, or windows in all layers but the last one of each period, or the
    first, whose number of layers the file may give. Raises CheckpointInvalid for a list of another length."""
    key, layers = f"{header.text('general.architecture')}.attention.sliding_window_pattern", layer_count(header)
    listed = header.metadata.get(key)
    if not isinstance(listed, tuple):
        every = count_or(header, key, period)
        listed = tuple((layer + (not first_full)) % every != 0 for layer in range(layers))
    if len(listed) != layers:
        raise CheckpointInvalid.of(header.path, f"{key} has {len(listed)} flags for {layers} layers")
    return [SLIDING if windowed else FULL for windowed in listed]


SIGMOID = 2
"""The value of expert_gating_func for the sigmoid."""
STACK = 3
"""The number of axes of a tensor that stacks matrices."""


def first_tensor(header: GgufHeader, part: str) -> tuple[int, ...]:
    """The shape of the weight of the first block that has this part; raises CheckpointInvalid if none has it."""
    names = (name for name in header.tensors if name.startswith("blk.") and name.endswith(f".{part}.weight"))
    found = next(names, None)
    if found is None:
        raise CheckpointInvalid.of(header.path, f"tensor 'blk.0.{part}.weight' is missing")
    return header.tensors[found].shape


EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
TURNED = frozenset({"rope.dimension_count", "vocab_size", "rope.scaling.factor"}) | {
    f"rope.scaling.yarn_{end}" for end in ("beta_fast", "beta_slow")
}
WINDOW = TURNED | {"attention.sliding_window"}
