"""Mixtral checkpoints: Mistral's layout with experts in the place of its feed-forward."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core.errors import Incompatible

from attn_models.decoder.config import DecoderConfig
from attn_models.families.door import refuse_others
from attn_models.families.llama import BLOCK, FIXED
from attn_models.families.mistral import MistralDoor

# What a MixtralConfig means by a key that is not there, where it is not what a MistralConfig means.
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
EXPERT = re.compile(r"feed_forward\.experts\.(\d+)\.(gate|up|down)\.weight")
MATRIX = {"gate": "w1", "up": "w3", "down": "w2"}


class MixtralDoor(MistralDoor):
    """Mistral whose layers send each token to k of E feed-forwards (Jiang et al. 2024, arXiv 2401.04088).

    Their weight of the balance loss is not taken over: it is of another sum, over all layers together.
    """

    model_type = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    defaults = DEFAULTS
    reads = MistralDoor.reads | {"num_local_experts", "num_experts_per_tok", "router_jitter_noise"}
    block = BLOCK | {"feed_forward.router.score": "block_sparse_moe.gate"}
    fixed = {key: value for key, value in FIXED.items() if key != "experts"} | {"routing": "mixtral", "bias": False}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a MixtralConfig."""
        refuse_others(values, {"router_jitter_noise": (0.0, None), "attention_bias": (False, None)})
        plain = super().configure(values)
        return dataclasses.replace(
            plain,
            experts=values.get("num_local_experts", 8),
            experts_per_token=values.get("num_experts_per_tok", 2),
        )

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A MixtralConfig that transformers 5 reads."""
        experts = config.mixture
        if experts is None:
            raise Incompatible("a decoder without experts cannot be said in a mixtral config.json")
        return super().describe(config) | {
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
        }

    def their_name(self, ours: str) -> str:
        """The checkpoint's name of one of the decoder's parameters."""
        _, _, rest = ours.partition("blocks.")
        layer, _, rest = rest.partition(".")
        expert = EXPERT.fullmatch(rest)
        if expert is None:
            return super().their_name(ours)
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert[1]}.{MATRIX[expert[2]]}.weight"
