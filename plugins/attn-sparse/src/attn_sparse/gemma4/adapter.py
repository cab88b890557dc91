"""The layout of Gemma 4's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import FULL, SLIDING, needed, objects_of, require_allowed, required_count
from attn_models.adapters.family import (
    GROUPED,
    LLAMA_NAMES,
    QK_NORM,
    FamilyAdapter,
    TextOfVisionModel,
    kind_keys,
    listed_kinds,
)
from attn_models.adapters.rope import Rope
from attn_models.attention import layer_attentions

from attn_sparse.gemma4.config import Gemma4Config

GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}
OWN = {name: name for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp")}


class Gemma4Adapter(FamilyAdapter):
    """The text model: windows, full layers with heads of their own size, normed values, and scores without a scale.

    The last layers may attend to the keys and values of the last one of their kind before them.
    """

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    Config = Gemma4Config
    fields = (
        GROUPED
        | OWN
        | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "attention_k_eq_v": "attention_k_eq_v"}
        | {"final_logit_softcapping": "final_logit_softcapping"}
    )
    fixed = {"norm": "rms", "norm_place": "both", "positions": "rotary", "scale_embedding": True}
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True} | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "sliding_window": 512,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
    }
    activation_key = "hidden_activation"
    activations = {"gelu_pytorch_tanh": "geglu_tanh"}
    allowed = {"attention_bias": (False, None)} | {
        "use_bidirectional_attention": ("vision", None),
    }
    reads = frozenset({"layer_types", "per_layer_config", "num_global_key_value_heads", "enable_moe_block"}) | {
        *EXPERTS.values()
    }
    mechanism = "attn-variants/gemma"
    ropes = {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.dense.{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
        | {
            "layer_embedding": "model.embed_tokens_per_layer",
            "layer_projection": "model.per_layer_model_projection",
            "layer_norm": "model.per_layer_projection_norm",
            "attended_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_feedforward_layernorm",
            "fed_norm": "post_feedforward_layernorm",
            "scalar": "layer_scalar",
            "layer_gate": "per_layer_input_gate",
            "layer_output": "per_layer_projection",
            "layer_output_norm": "post_per_layer_input_norm",
            "feed_forward.dense_norm": "pre_feedforward_layernorm",
            "feed_forward.dense_after": "post_feedforward_layernorm_1",
            "feed_forward.experts_norm": "pre_feedforward_layernorm_2",
            "feed_forward.experts_after": "post_feedforward_layernorm_2",
            "feed_forward.router.score": "router.proj",
            "feed_forward.router.scale": "router.scale",
            "feed_forward.router.expert_scale": "router.per_expert_scale",
        }
    )
    stacked = {"experts.gate_up_proj": ("gate", "up"), "experts.down_proj": ("down",)}
    stacked_transposed = False

    def build(self, config: Any) -> Any:
        """A new `Gemma4Decoder`."""
        from attn_sparse.gemma4.model import Gemma4Decoder

        return Gemma4Decoder(config)

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norms, the window, the sizes of heads, and the rotary positions."""
        kind = self._kinds(values)[layer]
        options: dict[str, Any] = {"norm_eps": values["rms_norm_eps"], "norm_values": True, "scale": 1.0}
        sizes = {theirs: needed(values, theirs) for theirs in GLOBAL} | self._own_sizes(values, layer, kind)
        for ours, theirs in (("head_dim", "head_dim"), ("num_kv_heads", "num_key_value_heads")):
            if sizes[theirs] != values[theirs]:
                options[ours] = required_count(sizes, theirs)
        return options | self.kind_options(values, kind)

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The experts, and the layer whose keys and values each layer attends to."""
        kinds, shared = self._kinds(values), required_count(values, "num_kv_shared_layers", least=0)
        first = len(kinds) - shared
        wanted = EXPERTS.items() if values.get("enable_moe_block") else ()
        experts: dict[str, Any] = {ours: required_count(values, theirs) for ours, theirs in wanted}
        if not shared:
            return experts
        if first < 1 or set(kinds[:first]) != set(kinds):
            allowed = f"fewer than {len(kinds)} layers, after a layer of each of their kinds"
            raise InvalidValue.of("num_kv_shared_layers", shared, allowed)
        last = {kind: place for place, kind in enumerate(kinds[:first])}
        return experts | {"kv_sharing": [*range(first), *(last[kind] for kind in kinds[first:])]}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions of full layers; raises `InvalidValue` for a factor that transformers ignores."""
        for own in objects_of(objects_of(values, "rope_parameters")["rope_parameters"], *self.ropes).values():
            if own and own.get("rope_type") in (None, "default"):
                require_allowed(own, {"partial_rotary_factor": (1, None)})
                needed(own, "rope_type")
        return super().rope(values)

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, the heads of full ones, and the number of layers that share keys and values."""
        keys = kind_keys(config)
        heads = [attention.config.head_layout for attention in layer_attentions(config)]
        full = next((one for one, kind in zip(heads, keys["layer_types"], strict=True) if kind == FULL), heads[-1])
        own = {layer for layer in range(config.num_layers) if config.source_layer(layer) == layer}
        return keys | {
            "global_head_dim": full.key_size,
            "num_global_key_value_heads": full.key_value,
            "num_kv_shared_layers": config.num_layers - len(own),
            "enable_moe_block": config.num_experts is not None,
            **{theirs: getattr(config, ours) for ours, theirs in EXPERTS.items()},
        }

    def layout(self, config: Any) -> FamilyAdapter:
        """As of `FamilyAdapter`; published checkpoints hold keys and values of layers that share others', too."""
        bound = super().layout(config)
        shared = [str(layer) for layer in range(config.num_layers) if config.source_layer(layer) < layer]
        unused = rf"layers\.({'|'.join(shared) or '(?!)'})\.self_attn\.(k|v)_(proj|norm)\."
        bound.derived_names = re.compile(f"{self.derived_names.pattern}|{unused}")  # type: ignore[misc]
        return bound

    def _own_sizes(self, values: Mapping[str, Any], layer: int, kind: str) -> dict[str, Any]:
        """The sizes of the heads of a layer that differ from the model's."""
        if values.get("per_layer_config") is not None:
            given = objects_of(values, "per_layer_config")["per_layer_config"].get(str(layer), {})
            if not isinstance(given, Mapping) or given.keys() - GLOBAL:
                raise InvalidValue.of(f"per_layer_config.{layer}", given, f"an object with {' and '.join(GLOBAL)}")
            return dict(given)
        if kind == SLIDING:
            return {}
        heads = values.get("num_global_key_value_heads") if values.get("attention_k_eq_v") else None
        return {"head_dim": values["global_head_dim"]} | ({} if heads is None else {"num_key_value_heads": heads})

    def _kinds(self, values: Mapping[str, Any]) -> Sequence[str]:
        """The kinds of layers, of which transformers makes the last a full one."""
        layers = range(required_count(values, "num_hidden_layers"))
        kinds = listed_kinds(values, [SLIDING if (each + 1) % 6 else FULL for each in layers])
        return [*kinds[:-1], FULL]


class Gemma4VisionAdapter(TextOfVisionModel, Gemma4Adapter):
    """The published checkpoints, whose text model is one of several: images and sounds are not read.

    Models are written as `gemma4_text`.
    """

    text = Gemma4Adapter
    model_type = "gemma4"
    layers = "model.language_model.layers"
    reads = frozenset({"text_config", "vision_config", "audio_config", "vision_soft_tokens_per_image"}) | {
        f"{word}_token_{what}"
        for word in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
        for what in ("id", "index")
    }
    names = {ours: theirs.replace("model.", "model.language_model.", 1) for ours, theirs in Gemma4Adapter.names.items()}
    derived_names = re.compile(r"rotary_emb\.|^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.")
