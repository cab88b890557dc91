"""GLM-4: the 9B models of 2024 (glm) and those of 2025 (glm4)."""

from __future__ import annotations

from attn_models.adapters.family import GATE_UP, LLAMA_FIELDS, LLAMA_NAMES, FamilyAdapter


class GlmAdapter(FamilyAdapter):
    """Interleaved rotary positions on half of each head, fused gate and up (GLM Team 2024, arXiv 2406.12793)."""

    model_type = "glm"
    architecture = "GlmForCausalLM"
    fields = LLAMA_FIELDS | {"attention_bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "rope_interleave": True, "attention_output_bias": False}
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 0.00000015625,
        "hidden_act": "silu",
        "attention_bias": True,
    }
    rotary_fraction = 0.5
    fused = {"mlp.gate_up_proj": GATE_UP}


class Glm4Adapter(GlmAdapter):
    """GLM with additional norms after each sublayer."""

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    fixed = GlmAdapter.fixed | {"norm_place": "both"}
    names = LLAMA_NAMES | {"attended_norm": "post_self_attn_layernorm", "fed_norm": "post_mlp_layernorm"}
