"""The adapter for OLMo 2: maps keys of its config.json to fields of the decoder, and tensors to parameters.

It is Llama's decoder with two changes (arXiv 2501.00656, section 3.1). Norms follow the sublayers, inside the residual
branch: h = x + norm(attention(x)), y = h + norm(mlp(h)). Queries and keys are normalised before rotary positions are
applied, each by the mean square over all of its heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_core.errors import Incompatible
from attn_models.adapters.base import FULL, SLIDING
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter

if TYPE_CHECKING:
    from attn_models.weights.gguf_reader import GgufHeader

AFTER = {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}


class Olmo2Adapter(FamilyAdapter):
    """Reads and writes checkpoint folders of `Olmo2ForCausalLM`.

    `attention_bias` adds biases to all four projections of attention, and to no other layer.
    """

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "bias": "attention_bias"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    names = LLAMA_NAMES | QK_NORM | AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The options of the norm of queries and keys, the same in all layers."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}


def olmo3_keys(header: GgufHeader) -> dict[str, Any]:
    """The keys of OLMo 3, which is OLMo 2 with windows in three of four layers; none of a file without windows."""
    if header.metadata.get("olmo2.attention.sliding_window", 0) == 0:
        return {}
    listed = header.metadata.get("olmo2.attention.sliding_window_pattern")
    base, local = (header.metadata.get(f"olmo2.rope.freq_base{end}") for end in ("", "_swa"))
    if not isinstance(listed, tuple) or local not in (None, base):
        wanted = "a list of the layers with windows, and one rotary base"
        raise Incompatible(
            f"{header.path}: windows with pattern {listed!r} and bases {base}, {local}; needed: {wanted}"
        )
    kinds = [SLIDING if windowed else FULL for windowed in listed]
    window = header.count("olmo2.attention.sliding_window")
    from attn_models.weights.gguf_rope import rope_parameters

    ropes = {FULL: rope_parameters(header, "olmo2"), SLIDING: {"rope_type": "default", "rope_theta": base}}
    return {"model_type": "olmo3", "layer_types": kinds, "sliding_window": window, "rope_parameters": ropes}
