"""Mamba-2."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import FamilyAdapter
from attn_models.adapters.qwen3_next import require_mechanism
from attn_models.attention import layer_attentions

CONTEXT = 1 << 20
"""The longest sequence, in tokens, where a config.json gives none: the state has the same size at any length."""

SIZES = {"state_size": "state_size", "groups": "n_groups", "expand": "expand", "taps": "conv_kernel"}
"""Options of the mechanism, and their keys in config.json."""

MIXER = {"input": "in_proj", "output": "out_proj"}
WHOLE = {"filters": "conv1d.weight", "filter_bias": "conv1d.bias", "rate": "A_log", "step_bias": "dt_bias"} | {
    "skip": "D",
    "norm": "norm.weight",
}


class Mamba2Adapter(FamilyAdapter):
    """Layers of state space duality (SSD) without feed-forwards (Dao and Gu 2024, arXiv 2405.21060)."""

    model_type = "mamba2"
    architecture = "Mamba2ForCausalLM"
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_heads",
        "norm_eps": "layer_norm_epsilon",
        "bias": "use_bias",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    fixed = {"norm": "rms", "positions": "none", "feed_forward": "none"}
    defaults = {"layer_norm_epsilon": 1e-5, "hidden_act": "silu", "max_position_embeddings": CONTEXT} | {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "expand": 2,
        "conv_kernel": 4,
    }
    activations = {}
    allowed = {"hidden_act": ("silu", "swish"), "use_conv_bias": (True,), "rms_norm": (True, None)} | {
        "rescale_prenorm_residual": (False, None)
    }
    mechanism = "attn-recurrent/mamba2"
    reads = frozenset({"chunk_size", "residual_in_fp32", "time_step_limit"}) | {
        f"time_step_{word}" for word in ("rank", "min", "max", "floor")
    }
    option_keys = SIZES
    layers = "backbone.layers"
    depthwise = re.compile(r"attention\.filters$")
    names = {
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "unembedding": "lm_head",
        "attention_norm": "norm",
        **{f"attention.{ours}": f"mixer.{theirs}" for ours, theirs in (MIXER | WHOLE).items()},
    }

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The sizes of the state; raises `InvalidValue` unless heads fill the inner width and steps are unlimited."""
        require_mechanism(self.mechanism, self.model_type)
        sizes = {ours: required_count(values, theirs) for ours, theirs in SIZES.items()}
        inner = sizes["expand"] * required_count(values, "hidden_size")
        require_allowed(values, {"head_dim": (inner / required_count(values, "num_heads"),)})
        low, high = _limit(values.get("time_step_limit"))
        if low > 0 or high < math.inf:
            raise InvalidValue.of("time_step_limit", [low, high], "no limit: time steps are not clamped here")
        return sizes | {"norm_eps": values["layer_norm_epsilon"]}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The sizes of the state, taken from the first layer."""
        own: Any = layer_attentions(config)[0].config
        sizes = {theirs: getattr(own, ours, None) for ours, theirs in SIZES.items()}
        return sizes | {"head_dim": (sizes["expand"] or 1) * config.hidden_size // config.num_heads}


def _limit(given: Any) -> tuple[float, float]:
    """The least and the greatest step size; infinity may be an object, as JSON has no number for it."""
    # Imported here because that package loads the weight readers, which listing the plugins does not need.
    from attn_models.weights.safe_files import INFINITE

    if given is None:
        return 0.0, math.inf
    ends = [math.inf if each == INFINITE else each for each in given] if isinstance(given, list) else []
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in ends):
        raise InvalidValue.of("time_step_limit", given, "two numbers")
    return float(ends[0]), float(ends[1])
