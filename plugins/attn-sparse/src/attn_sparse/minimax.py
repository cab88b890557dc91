"""MiniMax-M2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter
from attn_models.adapters.hf_config import Rope, one_rope_of, read_rope

MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERTS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
}


class MiniMaxM2Adapter(FamilyAdapter):
    """Queries and keys normed over all heads, a part of each head rotated, and experts chosen by sigmoids with biases
    in every layer."""

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    fields = GROUPED | EXPERTS | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "positions": "rotary", "routing": "deepseek_v3"}
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | {
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    allowed = {"scoring_func": ("sigmoid", None), "use_qk_norm": (True, None), "qk_norm_type": ("per_layer", None)} | {
        "use_routing_bias": (True, None),
        "shared_intermediate_size": (0, None),
        "attention_bias": (False, None),
        "sliding_window": (None,),
    }
    reads = frozenset({"attn_type_list", "rotary_dim", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"})
    derived_names = re.compile(r"rotary_emb\.inv_freq$|(^|\.)mtp\.")
    nulls = frozenset()
    rope_base = 5e6
    mechanism = "attn-variants/gemma"
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.experts.{{}}.{one}": f"block_sparse_moe.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {"feed_forward.router.score": "block_sparse_moe.gate"}
        | {"feed_forward.router.correction": "block_sparse_moe.e_score_correction_bias"}
    )

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """None: checks that every layer has softmax attention, as older files say by a list of ones."""
        layers = required_count(values, "num_hidden_layers")
        require_allowed(values, {"attn_type_list": ([1] * layers, None)})
        return {}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm over all heads."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions, whose part of a head older files give in elements."""
        given, turned = one_rope_of(values), values.get("rotary_dim")
        usual = {"partial_rotary_factor": values.get("partial_rotary_factor", given.get("partial_rotary_factor"))}
        if turned is not None and usual["partial_rotary_factor"] is None:
            size = required_count(values, "head_dim")
            usual["partial_rotary_factor"] = required_count(values, "rotary_dim", least=0) / size
            if usual["partial_rotary_factor"] > 1:
                raise InvalidValue.of("rotary_dim", turned, f"at most the head_dim {size}")
        if usual["partial_rotary_factor"] is None:
            return read_rope(values, base=self.rope_base, partial=True)
        return read_rope({**values, **usual}, base=self.rope_base, partial=True)
