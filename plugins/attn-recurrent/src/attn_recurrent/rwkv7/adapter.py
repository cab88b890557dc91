"""The layout of RWKV-7's checkpoints in flash-linear-attention, as RWKV7-World and RWKV7-Goose are published."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import StoredTensor, require_allowed, required_count
from attn_models.adapters.family import SIZES, BlockNames, FamilyAdapter
from attn_models.attention import layer_attentions
from attn_schema.decoder import AttentionChoice, DecoderConfig

from attn_recurrent.rwkv7.config import Rwkv7ModelConfig

TIME, CHANNEL = "attn-recurrent/rwkv7", "attn-recurrent/rwkv7_channel"
RANKS = {"decay_rank": "decay_low_rank_dim", "rate_rank": "a_low_rank_dim", "gate_rank": "gate_low_rank_dim"}
NETWORKS = {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora", "value_mix": "v_lora"}
MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
LAYER = re.compile(r"(?<=^model\.layers\.)\d+")


class Rwkv7Adapter(FamilyAdapter):
    """One layer of the checkpoint is two of ours, which mix time and channels."""

    model_type = "rwkv7"
    architecture = "RWKV7ForCausalLM"
    Config = Rwkv7ModelConfig
    fields = {ours: SIZES[ours] for ours in ("vocab_size", "max_seq_len", "hidden_size", "tie_word_embeddings")} | {
        "num_layers": "num_hidden_layers",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "value_rank": "v_low_rank_dim",
    }
    fixed = {"norm": "layer", "positions": "none", "feed_forward": "none"}
    defaults = {"max_position_embeddings": 2048, "norm_eps": 1e-5, "norm_bias": True, "norm_first": True} | {
        "decay_low_rank_dim": 64,
        "a_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "v_low_rank_dim": 16,
        "hidden_ratio": 4,
        "tie_word_embeddings": False,
    }
    activations = {}
    allowed = {"hidden_act": ("sqrelu", None), "attn": (None,)}
    reads = frozenset({"head_dim", "num_heads", "value_dim", "intermediate_size", *RANKS.values()}) | {
        *("attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    }
    option_keys = RANKS | {"inner": "intermediate_size"}
    nulls = frozenset()
    names = (
        {"embedding": "model.embeddings", "embedding_norm": "model.layers.0.pre_norm", "norm.plain": "model.norm"}
        | {"unembedding": "lm_head", "attention_norm": "attn_norm", "attention.query": "attn.r_proj"}
        | {"attention.key": "attn.k_proj", "attention.value": "attn.v_proj", "attention.output": "attn.o_proj"}
        | {f"attention.{ours}.down": f"attn.{theirs}.lora.0" for ours, theirs in NETWORKS.items()}
        | {f"attention.{ours}.up": f"attn.{theirs}.lora.2" for ours, theirs in NETWORKS.items()}
        | {"attention.key_scale": "attn.k_k", "attention.rate_scale": "attn.k_a", "attention.bonus": "attn.r_k"}
        | {"attention.gain": "attn.g_norm.weight", "attention.shift": "attn.g_norm.bias"}
    )
    kinds = {
        "attention.up.weight": BlockNames(
            {"attention_norm": "ffn_norm", "attention.mix": "ffn.x_k"}
            | {"attention.up": "ffn.key", "attention.down": "ffn.value"}
        )
    }

    def build(self, config: Any) -> Any:
        """A new `Rwkv7Decoder`."""
        from attn_recurrent.rwkv7.model import Rwkv7Decoder

        return Rwkv7Decoder(config)

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config, with two layers for each of the config.json."""
        values = {**self.defaults, **values}
        layers, width = required_count(values, "num_hidden_layers"), required_count(values, "hidden_size")
        require_allowed(values, {"value_dim": (None, width, [width] * layers)})
        doubled = {**values, "num_hidden_layers": 2 * layers}
        plain: Any = super().from_hf_config(doubled)
        both = (
            AttentionChoice(mechanism=TIME, options=self.layer_options(values, 0)),
            AttentionChoice(mechanism=CHANNEL, options={"inner": self._inner(values)}),
        )
        first: dict[str, Any] = {"mechanism": both[0].mechanism, "options": both[0].options}
        decoder: DecoderConfig = dataclasses.replace(plain, **first, pattern=both * layers)
        return decoder

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The number of heads, and whether embeddings are normed."""
        width = required_count(values, "hidden_size")
        size, given = values.get("head_dim"), values.get("num_heads")
        if given is None:
            given = width // required_count({"head_dim": 64 if size is None else size}, "head_dim")
        heads = required_count({"num_heads": given}, "num_heads")
        if width % heads or size not in (None, width // heads):
            raise InvalidValue.of("head_dim", size, f"the hidden_size {width} divided by the {heads} heads")
        norms = {"embedding_norm": bool(values["norm_first"])}
        return norms | {"num_heads": heads, "intermediate_size": self._inner(values)}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The inner sizes of networks, and the epsilon of the norm of heads."""
        heads = self.own_fields(values)["num_heads"]
        ranks = {ours: required_count(values, theirs) for ours, theirs in RANKS.items()}
        return ranks | {"norm_eps": values["norm_eps"] * (required_count(values, "hidden_size") // heads)}

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Time mixing."""
        return TIME

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """See `StateDictAdapter`; raises `InvalidValue` unless layers are of both kinds in turns."""
        kinds = [attention.full_name for attention in layer_attentions(config)]
        if kinds != [TIME, CHANNEL] * (len(kinds) // 2):
            raise InvalidValue.of("mechanism", kinds, f"{TIME} and {CHANNEL} in turns")
        return super().keys_of(config) | {"num_hidden_layers": config.num_layers // 2}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The sizes of heads, networks and the feed-forward."""
        both: list[Any] = [attention.config for attention in layer_attentions(config)[:2]]
        return {theirs: getattr(both[0], ours) for ours, theirs in RANKS.items()} | {
            "head_dim": config.hidden_size // config.num_heads,
            "num_heads": config.num_heads,
            "intermediate_size": both[1].inner_size,
            "norm_first": config.embedding_norm,
            "hidden_act": "sqrelu",
        }

    def split_rows(self, config: DecoderConfig) -> dict[str, dict[str, int]]:
        """Each mix is a tensor of its own."""
        return {"attention.mixes": {f"attn.{name}": 1 for name in MIXES}}

    def stored_shapes(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """The mixes have two further axes, and bonuses are by heads."""
        width, heads = config.hidden_size, config.num_heads
        return {"attention.mixes": (1, 1, width), "attention.bonus": (heads, width // heads)}

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """The tensors of blocks 2i and 2i + 1 are those of layer i."""

        def layer(found: re.Match[str]) -> str:
            return str(int(found[0]) // 2)

        stored = super().tensor_mappings(parameters)
        inside = [one.parameters[0].startswith("blocks.") for one in stored]
        return [
            dataclasses.replace(one, name=LAYER.sub(layer, one.name)) if block else one
            for one, block in zip(stored, inside, strict=True)
        ]

    def _inner(self, values: Mapping[str, Any]) -> int:
        """The inner size of the feed-forward."""
        if values.get("intermediate_size") is not None:
            return required_count(values, "intermediate_size")
        return -(-int(required_count(values, "hidden_size") * values["hidden_ratio"]) // 32) * 32
