"""Encoders with BERT's post-norm blocks in the layouts of transformers: ELECTRA, ALBERT, MPNet, and three with rotary
positions: Nomic Embed, GTE and Jina Embeddings v3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from attn_core.errors import InvalidValue
from attn_schema.decoder import AttentionChoice

from attn_models.adapters.base import inexpressible, require_allowed, required_count
from attn_models.adapters.bert import BLOCK, LM_HEAD, OUT_PROJ, OUTSIDE, READS, BertAdapter, RobertaAdapter
from attn_models.adapters.modernbert import GATES
from attn_models.adapters.rope import Rope, read_rope, rope_parameters
from attn_models.encoder.config import EncoderConfig


class ElectraAdapter(BertAdapter):
    """BERT with embeddings of another size, which a linear layer maps to the width (Clark et al. 2020, arXiv
    2003.10555)."""

    model_type = "electra"
    prefix = "electra."
    architecture = "ElectraModel"
    known_keys = READS | {"embedding_size"}
    outside = OUTSIDE | {"projection": "embeddings_project"}
    derived_names = re.compile(BertAdapter.derived_names.pattern + r"|^(generator|discriminator)_")
    head_names: ClassVar[Mapping[str, str]] = {
        "cls.predictions.transform": "generator_predictions",
        "cls.predictions.bias": "generator_lm_head.bias",
        **OUT_PROJ,
    }
    masked_activation = pooled_activation = "gelu"

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The size of the embeddings, where it is not the width."""
        size = required_count(values, "embedding_size", 128)
        return {"embedding_size": None if size == values["hidden_size"] else size}

    def keys_of(self, config: EncoderConfig) -> dict[str, Any]:
        """The size of the embeddings."""
        return {"embedding_size": config.embedding_width}


class AlbertAdapter(BertAdapter):
    """BERT with embeddings of another size, and with `num_hidden_groups` groups of `inner_group_num` blocks, each of
    which an equal part of the layers repeats (Lan et al. 2019, arXiv 1909.11942)."""

    model_type = "albert"
    prefix = "albert."
    architecture = "AlbertModel"
    activation = "gelu_new"
    known_keys = READS | {"embedding_size", "num_hidden_groups", "inner_group_num"}
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": ("absolute", None)}
    derived_names = re.compile(BertAdapter.derived_names.pattern + r"|^(predictions|sop_classifier)\.")
    head_names: ClassVar[Mapping[str, str]] = {
        "cls.predictions.transform": "predictions",
        "cls.predictions.bias": "predictions.bias",
        "pooler.dense": "albert.pooler",
    }
    outside = OUTSIDE | {"projection": "encoder.embedding_hidden_mapping_in"}
    block: ClassVar[Mapping[str, str]] = {
        **{f"attention.{name}": f"attention.{name}" for name in ("query", "key", "value")},
        "attention.output": "attention.dense",
        "attention_norm": "attention.LayerNorm",
        "feed_forward.up": "ffn",
        "feed_forward.down": "ffn_output",
        "feed_forward_norm": "full_layer_layer_norm",
    }

    inner: int = 1
    """The number of blocks of a group."""

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The size of the embeddings, and the block of each layer."""
        counts = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")
        layers, groups, inner = (required_count(values, name, 1) for name in counts)
        if groups > layers:
            raise InvalidValue.of("num_hidden_groups", groups, f"at most the {layers} layers")
        size = required_count(values, "embedding_size", 128)
        repeats = blocks_of(layers, groups, inner)
        return {"num_layers": len(repeats), "embedding_size": size, "repeats": repeats}

    def keys_of(self, config: EncoderConfig) -> dict[str, Any]:
        """The size of the embeddings, and the groups of blocks."""
        inner = inner_group(config)
        return {
            "embedding_size": config.embedding_width,
            "num_hidden_layers": config.num_layers // inner,
            "num_hidden_groups": config.num_blocks // inner,
            "inner_group_num": inner,
        }

    def layout(self, config: EncoderConfig) -> AlbertAdapter:
        """The layout of this encoder's tensors, whose names depend on the size of a group."""
        found = AlbertAdapter()
        found.inner = inner_group(config)
        return found

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """As of any encoder; the same blocks may lie in groups of another size."""
        given = super().canonical_names(names)
        inner = 1 + max((int(found[2]) for found in map(BLOCK_NAME.match, given) if found), default=0)
        return {
            BLOCK_NAME.sub(lambda m: self.place(str(int(m[1]) * inner + int(m[2]))), name): own
            for name, own in given.items()
        }

    def place(self, block: str) -> str:
        """The name of a block."""
        group, inner = divmod(int(block), self.inner)
        return f"encoder.albert_layer_groups.{group}.albert_layers.{inner}"


BLOCK_NAME = re.compile(r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)")


def blocks_of(layers: int, groups: int, inner: int) -> tuple[int, ...]:
    """The block that each layer computes: every group of blocks for an equal part of the layers."""
    firsts = (int(layer / (layers / groups)) * inner for layer in range(layers))
    return tuple(first + place for first in firsts for place in range(inner))


def inner_group(config: EncoderConfig) -> int:
    """The number of blocks of a group; 1 where no number gives the blocks of the config."""
    blocks, layers = config.num_blocks, config.num_layers
    sizes = [inner for inner in range(1, blocks + 1) if blocks % inner == 0 and layers % inner == 0]
    return next((n for n in sizes if blocks_of(layers // n, blocks // n, n) == config.repeats), 1)


MPNET_BUCKETS, MPNET_PADDING = 32, 1
"""The number of buckets, and the id of padding, whatever the config says."""


class MpnetAdapter(RobertaAdapter):
    """RoBERTa without token types and with T5's biases, which all layers share (Song et al. 2020, arXiv 2004.09297)."""

    model_type = "mpnet"
    prefix = "mpnet."
    architecture = "MPNetModel"
    untyped = True
    known_keys = (READS - {"type_vocab_size"}) | {"relative_attention_num_buckets", "pad_token_id"}
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"relative_attention_num_buckets": (MPNET_BUCKETS,)}
    block = BLOCK | {
        **{f"attention.{name}": f"attention.attn.{name[0]}" for name in ("query", "key", "value", "output")},
        "attention_norm": "attention.LayerNorm",
    }
    outside = OUTSIDE | {"blocks.0.attention.modifiers.t5_bias": "encoder.relative_attention_bias"}

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """No token types, and biases that all layers share."""
        return {"type_vocab_size": 0, "shared_biases": True}

    def positions_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """As RoBERTa's, with padding of this id."""
        return super().positions_of({**values, "pad_token_id": MPNET_PADDING})

    def attention_choices(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:  # noqa: ARG002
        """Scaled products and biases of 32 buckets in every layer."""
        return (AttentionChoice(mechanism="attn-variants/t5_bias", options={"scaled": True, "buckets": MPNET_BUCKETS}),)

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a model parameter."""
        return super().hf_name(ours.replace(".table", ".weight"))


class RotaryBertAdapter(BertAdapter):
    """BERT with rotary positions, whose base is `theta` where none is given."""

    theta: ClassVar[float]
    known_keys = READS | {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "head_dim"}
    known_keys |= {"original_max_position_embeddings"}
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def positions_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rotary positions; raises `InvalidValue` for another size of heads than a part of the width."""
        size = required_count(values, "hidden_size") // required_count(values, "num_attention_heads")
        require_allowed(values, {"head_dim": (size, None)})
        rope = read_rope(values, self.theta)
        turned = {"positions": "rotary", "rope_theta": rope.base, "rope_scaling": rope.scaling}
        return super().positions_of(values) | turned

    def hf_positions(self, config: EncoderConfig) -> dict[str, Any]:
        """The rotary positions."""
        if config.positions != "rotary":
            raise inexpressible({"positions": config.positions}, self.model_type)
        rope = rope_parameters(Rope(base=config.rope_theta, scaling=config.rope_scaling))
        return {"max_position_embeddings": config.max_seq_len, "rope_parameters": rope}


QKV = ("attention.query", "attention.key", "attention.value")


class NomicBertAdapter(RotaryBertAdapter):
    """Nomic Embed: gated feed-forwards, and biases in norms only (Nussbaum et al. 2024, arXiv 2402.01613)."""

    model_type = "nomic_bert"
    prefix = "nomic_bert."
    architecture = "NomicBertModel"
    theta = 1000.0
    activation, activations = "silu", GATES
    outside = OUTSIDE | {"norm": "emb_ln"}
    layers = "encoder.layers"
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {"attn.Wqkv": QKV}
    block: ClassVar[Mapping[str, str]] = {
        "attention.output": "attn.out_proj",
        "attention_norm": "norm1",
        "feed_forward.up": "mlp.fc11",
        "feed_forward.gate": "mlp.fc12",
        "feed_forward.down": "mlp.fc2",
        "feed_forward_norm": "norm2",
    }
    head_names: ClassVar[Mapping[str, str]] = {
        "cls.predictions.transform.LayerNorm": "cls.predictions.transform.layer_norm",
        "pooler": "nomic_bert.pooler",
    }

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """No biases."""
        return {"attention_bias": False, "feed_forward_bias": False}


class GteAdapter(RotaryBertAdapter):
    """GTE: gated feed-forwards, without biases of the gates (Zhang et al. 2024, arXiv 2407.19669)."""

    model_type = "gte"
    prefix = "gte."
    architecture = "GteModel"
    theta = 160000.0
    activations = GATES
    untyped = True
    zeros = re.compile(r"feed_forward\.(gate|up)\.bias$")
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention.qkv_proj": QKV,
        "mlp.up_gate_proj": ("feed_forward.up", "feed_forward.gate"),
    }
    block: ClassVar[Mapping[str, str]] = {
        "attention.output": "attention.o_proj",
        "attention_norm": "attn_ln",
        "feed_forward.down": "mlp.down_proj",
        "feed_forward_norm": "mlp_ln",
    }
    head_names = LM_HEAD | {
        "cls.predictions.transform.LayerNorm": "lm_head.norm",
        "cls.predictions.bias": "lm_head.decoder.bias",
        "pooler": "gte.pooler",
    }
    masked_activation = "gelu"


class JinaV3Adapter(RotaryBertAdapter):
    """Jina Embeddings v3 without the LoRA adapters of its tasks (Sturua et al. 2024, arXiv 2409.10173)."""

    model_type = "jina_embeddings_v3"
    prefix = "roberta."
    architecture = "JinaEmbeddingsV3Model"
    theta = 20000.0
    outside = OUTSIDE | {"norm": "emb_ln"}
    layers = "encoder.layers"
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {"mixer.Wqkv": QKV}
    block: ClassVar[Mapping[str, str]] = {
        "attention.output": "mixer.out_proj",
        "attention_norm": "norm1",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
        "feed_forward_norm": "norm2",
    }
    head_names = LM_HEAD | OUT_PROJ
    masked_activation = "gelu"
