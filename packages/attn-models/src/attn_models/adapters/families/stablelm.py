"""StableLM and Phi, whose blocks may compute both sublayers from one LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.family import GELUS, GROUPED, LLAMA_NAMES, FamilyAdapter


class StableLmAdapter(FamilyAdapter):
    """LayerNorm, rotary positions on a quarter of each head (Bellagente et al. 2024, arXiv 2402.17834).

    Models with norms of queries and keys (`qk_layernorm`, the 12B) are refused: each head has a norm of its own.
    """

    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    fields = GROUPED | {"norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias", "dropout": "hidden_dropout"}
    fixed = {
        "norm": "layer",
        "norm_bias": True,
        "positions": "rotary",
        "attention_output_bias": False,
        "feed_forward_bias": False,
    }
    defaults = {"layer_norm_eps": 1e-5, "hidden_act": "silu", "use_parallel_residual": False}
    allowed = {"qk_layernorm": (False, None)}
    rotary_fraction = 0.25

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Whether both sublayers read one norm."""
        return {"norm_place": "parallel_shared" if values["use_parallel_residual"] else "pre"}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """Whether both sublayers read one norm."""
        return {"use_parallel_residual": config.norm_place == "parallel_shared"}


class PhiAdapter(FamilyAdapter):
    """Phi-1, 1.5 and 2: one LayerNorm for both sublayers, biases everywhere, rotary positions on a part of each head
    (Gunasekar et al. 2023, arXiv 2306.11644)."""

    model_type = "phi"
    architecture = "PhiForCausalLM"
    fields = GROUPED | {"norm_eps": "layer_norm_eps"}
    fixed = {
        "norm": "layer",
        "norm_place": "parallel_shared",
        "positions": "rotary",
        "bias": True,
        "unembedding_bias": True,
    }
    defaults = {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new"}
    activations = GELUS
    allowed = {"qk_layernorm": (False, None), "tie_word_embeddings": (False, None)}
    rotary_fraction = 0.5
    names = LLAMA_NAMES | {
        "norm": "model.final_layernorm",
        "attention.output": "self_attn.dense",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    }
