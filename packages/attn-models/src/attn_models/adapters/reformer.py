"""Reformer checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import AttentionChoice

from attn_models.adapters.base import (
    ACTIVATIONS,
    HEADS,
    HF_ACTIVATIONS,
    EncoderAdapter,
    Layout,
    StoredTensor,
    needed,
    require_allowed,
)
from attn_models.encoder.config import ReformerConfig, attention_of

if TYPE_CHECKING:
    from attn_models.encoder.encoder import Reformer

HASHED, LOCAL = "attn-variants/lsh", "attn-variants/chunk_ring"
SIZES = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "feed_forward_size",
    "head_dim": "attention_head_size",
}
OUTSIDE = {
    "embedding.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.embedding.weight",
    "positions.row": "embeddings.position_embeddings.weights.0",
    "positions.column": "embeddings.position_embeddings.weights.1",
    "norm.weight": "encoder.layer_norm.weight",
    "norm.bias": "encoder.layer_norm.bias",
}
BLOCK = {
    "attention.query": "attention.self_attention.query",
    "attention.key": "attention.self_attention.key",
    "attention.value": "attention.self_attention.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.layer_norm",
    "feed_forward.up": "feed_forward.dense.dense",
    "feed_forward.down": "feed_forward.output.dense",
    "feed_forward_norm": "feed_forward.layer_norm",
}
OWN = {
    "attn_layers",
    "num_hidden_layers",
    "num_buckets",
    "num_hashes",
    "hash_seed",
    "lsh_attn_chunk_length",
    "local_attn_chunk_length",
    "axial_pos_embds",
    "axial_pos_shape",
    "axial_pos_embds_dim",
    "axial_norm_std",
    "chunk_size_lm_head",
    "hidden_act",
    "layer_norm_eps",
    "is_decoder",
    "tie_word_embeddings",
}
# The numbers of neighbouring chunks that a chunk attends to, which are fixed.
NEIGHBOURS = {
    "lsh_num_chunks_before": (1,),
    "lsh_num_chunks_after": (0,),
    "local_num_chunks_before": (1,),
    "local_num_chunks_after": (0,),
}
# Options that transformers does not have, with the values that it computes.
HF_HASHING = {"within": "chunks", "duplicates": "counted", "ring": "rounds"}


class ReformerAdapter(EncoderAdapter):
    """Layers of LSH attention, and of local attention whose chunks form a ring; the encoder only.

    A text has the hidden states that transformers computes for it alone. In a padded batch there, the chunk before a
    text's first is the last of the longest text, so that hidden states depend on the batch.

    Hash rotations are not part of a checkpoint: transformers draws them at every call, or from `hash_seed`; attn draws
    them from the layer's number, or from `hash_seed`.
    """

    model_type = "reformer"
    prefix = "reformer."
    known_keys = frozenset({*SIZES.values(), *OWN, *NEIGHBOURS})

    def from_hf_config(self, values: Mapping[str, Any]) -> ReformerConfig:
        """Build the encoder config from a ReformerConfig."""
        require_allowed(values, {"is_decoder": (False,), "hidden_act": tuple(ACTIVATIONS), **NEIGHBOURS})
        kinds = needed(values, "attn_layers")
        if not isinstance(kinds, list) or not kinds or any(kind not in ("lsh", "local") for kind in kinds):
            raise InvalidValue.of("attn_layers", kinds, "a list of 'lsh' and 'local'")
        axial = values.get("axial_pos_embds", True)
        return ReformerConfig(
            **{ours: needed(values, theirs) for ours, theirs in SIZES.items()},
            num_layers=len(kinds),
            pattern=tuple(_choice(values, kind, layer) for layer, kind in enumerate(kinds)),
            axial_pos_shape=_pair(values, "axial_pos_shape") if axial else None,
            axial_pos_embds_dim=_pair(values, "axial_pos_embds_dim") if axial else None,
            feed_forward=ACTIVATIONS[values.get("hidden_act", "relu")],
            norm_eps=values.get("layer_norm_eps", 1e-12),
        )

    def to_hf_config(self, config: ReformerConfig) -> dict[str, Any]:
        """The ReformerConfig, as transformers 5 reads it; raises `Incompatible` for what it cannot express."""
        attentions = [attention_of(config, layer) for layer in range(config.num_layers)]
        chosen: list[Any] = [attention.config for attention in attentions]
        names = [attention.full_name for attention in attentions]
        if any(name not in (HASHED, LOCAL) for name in names):
            raise Incompatible(
                f"other mechanisms than {HASHED!r} and {LOCAL!r} cannot be expressed in a {self.model_type}"
            )
        hashed = [one for one, name in zip(chosen, names, strict=True) if name == HASHED]
        local = [one for one, name in zip(chosen, names, strict=True) if name == LOCAL]
        if any(getattr(one, name) != value for one in hashed for name, value in HF_HASHING.items()):
            raise Incompatible(f"hashing other than with {HF_HASHING} cannot be expressed in a reformer config.json")
        if any(one.reach != 1 for one in local) or len({one.chunk for one in chosen}) > 1:
            raise Incompatible(
                "chunks that attend to more than one other chunk, or differ in size, cannot be expressed in a reformer"
            )
        if len({(one.buckets, one.rounds) for one in hashed}) > 1:
            raise Incompatible(
                "buckets and rounds that differ between layers cannot be expressed in a reformer config.json"
            )
        return {
            "architectures": ["ReformerModel"],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            "attention_head_size": config.head_dim or config.hidden_size // config.num_heads,
            "attn_layers": ["lsh" if name == HASHED else "local" for name in names],
            "lsh_attn_chunk_length": chosen[0].chunk,
            "local_attn_chunk_length": chosen[0].chunk,
            **({"num_buckets": hashed[0].buckets, "num_hashes": hashed[0].rounds} if hashed else {}),
            "hash_seed": _hash_seed({n: chosen[n].seed for n, name in enumerate(names) if name == HASHED}),
            "axial_pos_embds": config.axial_pos_shape is not None,
            **(
                {"axial_pos_shape": config.axial_pos_shape, "axial_pos_embds_dim": config.axial_pos_embds_dim}
                if config.axial_pos_shape
                else {}
            ),
            "hidden_act": HF_ACTIVATIONS[config.feed_forward],
            "layer_norm_eps": config.norm_eps,
            "is_decoder": False,
        }

    def build(self, config: ReformerConfig) -> Reformer:
        """Build an encoder with random weights."""
        from attn_models.encoder.encoder import Reformer

        return Reformer(config)

    def layout(self, config: ReformerConfig) -> Layout:
        """The layout of this encoder's tensors, whose values depend on the size of a head."""
        return ReformerLayout(config.head_dim or config.hidden_size // config.num_heads)

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """As `ReformerLayout` with heads of one element, whose query weights are not scaled."""
        return ReformerLayout(1).tensor_mappings(parameters)


class ReformerLayout(Layout):
    """Shared query-key matrices, multiplied by √head size because scores are not divided by it in transformers."""

    model_type = "reformer"
    derived_names = re.compile(HEADS.pattern + r"|mask_value_float(16|32)$")
    canonical_names = EncoderAdapter.canonical_names
    prefix = ReformerAdapter.prefix

    def __init__(self, head_size: int) -> None:
        self.head_dim = head_size

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        known, found = set(parameters), []
        for name in parameters:
            if name in OUTSIDE:
                found.append(StoredTensor(OUTSIDE[name], (name,)))
                continue
            _, layer, rest = name.split(".", 2)
            part, _, leaf = rest.rpartition(".")
            shared = part == "attention.query" and f"blocks.{layer}.attention.key.weight" not in known
            their = f"encoder.layers.{layer}.{BLOCK[part]}{'_key' if shared else ''}.{leaf}"
            found.append(StoredTensor(their, (name,), scale=self.head_dim**0.5 if shared else 1.0))
        return found


def _choice(values: Mapping[str, Any], kind: str, layer: int) -> AttentionChoice:
    chunk = values.get("lsh_attn_chunk_length", 64)
    # transformers pads to the longer chunk: the first of the shorter chunks would follow one with only padding.
    require_allowed(
        {"local_attn_chunk_length": values.get("local_attn_chunk_length", 64)}, {"local_attn_chunk_length": (chunk,)}
    )
    if kind == "local":
        return AttentionChoice(mechanism=LOCAL, options={"chunk": chunk})
    buckets, seed = values.get("num_buckets"), values.get("hash_seed")
    if not isinstance(buckets, int):
        allowed = "an even number; null, for a choice by the length of the first input, is not supported"
        raise InvalidValue.of("num_buckets", buckets, allowed)
    sizes = {"buckets": buckets, "rounds": values.get("num_hashes", 1), "chunk": chunk}
    return AttentionChoice(mechanism=HASHED, options=sizes | HF_HASHING | {"seed": layer if seed is None else seed})


def _pair(values: Mapping[str, Any], key: str) -> tuple[int, int]:
    given = needed(values, key)
    if not isinstance(given, list) or len(given) != 2:
        raise InvalidValue.of(key, given, "a list of two whole numbers")
    return given[0], given[1]


def _hash_seed(seeds: Mapping[int, int]) -> int | None:
    """The seed that all hashing layers share, from their seeds by layer; None where each is the layer's number."""
    if all(layer == seed for layer, seed in seeds.items()):
        return None
    if len(set(seeds.values())) > 1:
        raise Incompatible("seeds that differ between layers cannot be expressed in a reformer config.json")
    return int(next(iter(seeds.values())))
