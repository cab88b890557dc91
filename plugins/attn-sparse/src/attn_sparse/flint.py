"""Flint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter, kind_keys, listed_kinds

MATRICES = ("gate", "up", "down")
SHARED = "shared_expert_intermediate_size"


class FlintAdapter(FamilyAdapter):
    """Sinks and normed queries and keys in every layer, rotary positions only where there is a window, and experts."""

    model_type = "flint"
    architecture = "FlintForCausalLM"
    fields = (
        GROUPED
        | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "bias": "attention_bias"}
        | {
            "num_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "moe_intermediate_size": "moe_intermediate_size",
        }
    )
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False, "routing": "deepseek_v3"}
    defaults = {"num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | {
        "sliding_window": 513,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        SHARED: 1024,
        "mlp_only_layers": None,
    }
    allowed = {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)}
    reads = frozenset({"layer_types"})
    mechanism = "attn-variants/sink"
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in MATRICES}
        | {f"feed_forward.shared.{one}": f"mlp.shared_expert.{one}_proj" for one in MATRICES}
        | {"attention.distribution.logit": "self_attn.softmax_offset", "feed_forward.router.score": "mlp.gate"}
    )
    zeros = re.compile(r"router\.correction$")

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """A window, or no rotary positions: full layers are the first two, every fourth and the last."""
        last = required_count(values, "num_hidden_layers") - 1
        usual = [FULL if each < 2 or each % 4 == 1 or each == last else SLIDING for each in range(last + 1)]
        full = listed_kinds(values, usual)[layer] == FULL
        own = {"rotary": None} if full else self.kind_options(values, SLIDING)
        return {"norm_eps": values["rms_norm_eps"], **own}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dense layers, which must be the first, and the shared expert, as a number of experts."""
        dense = [0, 1] if values["mlp_only_layers"] is None else values["mlp_only_layers"]
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise InvalidValue.of("mlp_only_layers", dense, "the numbers of the first layers, without gaps")
        width, shared = (required_count(values, key) for key in ("moe_intermediate_size", SHARED))
        if shared % width:
            raise InvalidValue.of(SHARED, shared, f"a multiple of the moe_intermediate_size {width}")
        return {"first_k_dense_replace": len(dense), "n_shared_experts": shared // width}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, and the width of the shared expert."""
        shared = (config.n_shared_experts or 0) * config.expert_width
        return kind_keys(config) | {SHARED: shared, "mlp_only_layers": list(range(config.first_k_dense_replace))}
