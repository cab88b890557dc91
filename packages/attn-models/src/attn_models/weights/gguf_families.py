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

from attn_core.errors import CheckpointInvalid, Incompatible
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from attn_models.weights.gguf_architectures import (
    GgufArchitecture,
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
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
WITHOUT_ROTARY = ("bloom", "gpt2", "mpt")
"""Families without rotary positions."""
GPT2 = {
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
}
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
    `GgufArchitecture`.
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
        shared = count_or(header, f"{self.name}.attention.head_count_kv", heads)
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
        from attn_models.adapters.registry import decoder_adapter
        from attn_models.adapters.state_dict import init_empty_weights, stored_shapes

        adapter = decoder_adapter(config["model_type"])
        decoder = adapter.from_hf_config(config)
        with init_empty_weights():
            model = adapter.build(decoder)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        architecture = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == self.name)
        names = get_tensor_name_map(architecture, decoder.num_layers)
        layout, found = adapter.layout(decoder), []
        transposed = {item.name for item in layout.tensor_mappings(list(shapes)) if item.transposed}
        for theirs, (shape, groups) in stored_shapes(layout, shapes).items():
            own = self.placed(header, config, theirs, shape)
            if own is not None:
                found.append(own)
                continue
            source, expert = _source(theirs, names.get_name)
            if source is None:
                raise Incompatible(
                    f"{header.path}: GGUF files of {self.name} have no name for the tensor {theirs!r}", path=header.path
                )
            rotary_heads = {"attn_q": decoder.num_heads, "attn_k": decoder.num_kv_heads or decoder.num_heads}
            heads = rotary_heads.get(source.split(".")[-2], 0) if self.permuted else 0
            fused = _fused(source, decoder) if groups > 1 else ()
            placement = Placement(source, theirs, shape, rotary_heads=heads, fused=fused, groups=groups, expert=expert)
            found.append(replace(placement, transposed=theirs in transposed))
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
        size = count_or(header, f"{self.name}.attention.key_length", width // heads)
        if count_or(header, f"{self.name}.attention.value_length", size) != size:
            rule = f"value heads that differ in size from the key heads are not supported for {self.name}"
            raise Incompatible(f"{header.path}: {rule}", path=header.path, what="attention.value_length")
        return heads, size

    def architecture(self) -> GgufArchitecture:
        """The `GgufArchitecture` that reads files of this family."""
        return GgufArchitecture(self.name, self.config, self.placements, self.read, self.passed)

    def _rope(self, header: GgufHeader) -> Keys:
        if f"{self.name}.rope.freq_base" not in header.metadata and self.model_type in WITHOUT_ROTARY:
            return {}
        rope = rope_parameters(header, self.name)
        _, size = self._heads(header)
        rotary_size = count_or(header, f"{self.name}.rope.dimension_count", size)
        if rotary_size != size:
            rope["partial_rotary_factor"] = rotary_size / size
        return {"rope_parameters": rope}


def _source(theirs: str, named: Callable[..., str | None]) -> tuple[str | None, int | None]:
    """The GGUF name of a Hugging Face tensor, and the expert's index if it belongs to an expert."""
    expert = EXPERT.search(theirs)
    if expert is not None:
        layer = re.search(r"\d+", theirs)
        return f"blk.{layer[0] if layer else ''}.ffn_{expert[2]}_exps.weight", int(expert[1])
    # For some families, converters remove this prefix before looking up a name.
    tried = (named(name, try_suffixes=(".weight", ".bias")) for name in (theirs, theirs.removeprefix("transformer.")))
    return next((found for found in tried if found is not None), None), None


def _fused(source: str, decoder: Any) -> tuple[int, ...]:
    """The numbers of rows of queries, keys and values in a fused projection."""
    if source.split(".")[-2] != "attn_qkv":
        return ()
    size = decoder.head_dim or decoder.hidden_size // decoder.num_heads
    shared = (decoder.num_kv_heads or decoder.num_heads) * size
    return decoder.num_heads * size, shared, shared


def _window(header: GgufHeader, name: str) -> Keys:
    """The sliding window; null where the file has none."""
    window = count_or(header, f"{name}.attention.sliding_window", 0)
    return {"sliding_window": window or None}


def number(header: GgufHeader, key: str) -> float:
    """The number under `key`, as the shortest decimal of the file's float32."""
    return shortest_float32(header.number(key))


def _granite(header: GgufHeader) -> Keys:
    theirs = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {
        key: number(header, f"granite.{name}") for key, name in theirs.items() if f"granite.{name}" in header.metadata
    }


def _experts(header: GgufHeader) -> Keys:
    count = header.count("qwen3moe.expert_count")
    stacked = header.tensors.get("blk.0.ffn_gate_exps.weight")
    if stacked is None or stacked.shape[0] != count:
        raise CheckpointInvalid.of(
            header.path,
            f"{count} experts, but no tensor 'blk.0.ffn_gate_exps.weight' of {count} experts",
        )
    return {
        "num_experts": count,
        "num_experts_per_tok": header.count("qwen3moe.expert_used_count"),
        "moe_intermediate_size": header.count("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _falcon(header: GgufHeader) -> Keys:
    heads = header.count("falcon.attention.head_count")
    shared = count_or(header, "falcon.attention.head_count_kv", heads)
    two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    new = two_norms or shared not in (1, heads)
    keys = {"new_decoder_architecture": new, "multi_query": not new and shared == 1, "parallel_attn": True}
    return keys | ({"num_kv_heads": shared, "num_ln_in_parallel_attn": 2 if two_norms else 1} if new else {})


TURNED = frozenset({"rope.dimension_count", "vocab_size", "rope.scaling.factor"}) | {
    f"rope.scaling.yarn_{end}" for end in ("beta_fast", "beta_slow")
}
WINDOW = TURNED | {"attention.sliding_window"}
LAYER_NORM = TURNED | {"attention.layer_norm_epsilon"}
SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})

GGUF_FAMILIES = (
    GgufFamily("qwen2", "qwen2", read=TURNED),
    GgufFamily("qwen3", "qwen3", read=TURNED),
    GgufFamily("qwen3moe", "qwen3_moe", _experts, read=TURNED | EXPERTS),
    GgufFamily("phi3", "phi3", lambda header: _window(header, "phi3"), read=WINDOW),
    GgufFamily("smollm3", "smollm3", permuted=True, read=TURNED),
    GgufFamily("granite", "granite", _granite, permuted=True, read=TURNED | SCALES),
    GgufFamily("starcoder2", "starcoder2", lambda header: _window(header, "starcoder2"), read=LAYER_NORM | WINDOW),
    GgufFamily(
        "gptneox",
        "gpt_neox",
        lambda header: {"use_parallel_residual": bool(header.metadata.get("gptneox.use_parallel_residual", True))},
        read=LAYER_NORM | {"use_parallel_residual"},
    ),
    GgufFamily("falcon", "falcon", _falcon, read=LAYER_NORM),
    GgufFamily("gpt2", "gpt2", read=frozenset({"attention.layer_norm_epsilon"}), named=GPT2),
    GgufFamily("bloom", "bloom", read=LAYER_NORM),
    GgufFamily("mpt", "mpt", read=LAYER_NORM, passed={"attention.max_alibi_bias": (8.0,)}),
    GgufFamily(
        "command-r",
        "cohere",
        lambda header: {"logit_scale": number(header, "command-r.logit_scale")},
        read=LAYER_NORM | {"logit_scale"},
    ),
    GgufFamily(
        "cohere2",
        "cohere2",
        lambda header: _window(header, "cohere2") | {"logit_scale": number(header, "cohere2.logit_scale")},
        read=LAYER_NORM | WINDOW | {"logit_scale"},
    ),
    GgufFamily("glm4", "glm4", read=TURNED),
)
"""Families with a llama.cpp architecture whose adapter is a `FamilyAdapter` or that of GPT-2."""
