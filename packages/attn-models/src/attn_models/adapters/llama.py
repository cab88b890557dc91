"""Llama, Mistral and Mixtral checkpoints in the layout of Hugging Face's transformers (versions 4 and 5)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attn_core import Causal, Mask, Window
from attn_core.checks import whole
from attn_core.errors import Incompatible
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import KEYS, StateDictAdapter, StoredTensor, needed, require_allowed, with_base_prefix
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, ROPE_KEYS
from attn_models.adapters.hf_config import common_hf_config, require_fields, softmax_heads
from attn_models.adapters.rope import model_rope, read_rope, rope_parameters

OUTSIDE = {f"{name}.weight": f"{LLAMA_NAMES[name]}.weight" for name in ("embedding", "norm", "unembedding")}
BLOCK = {name: theirs for name, theirs in LLAMA_NAMES.items() if f"{name}.weight" not in OUTSIDE}
FIXED = {
    "norm": "rms",
    "norm_place": "pre",
    "feed_forward": "swiglu",
    "positions": "rotary",
    "rope_interleave": False,
    "partial_rotary_factor": 1.0,
    "scale_embedding": False,
    "final_logit_softcapping": None,
    "num_experts": None,
    "num_nextn_predict_layers": 0,
}
READS = frozenset(
    {*GROUPED.values(), *ROPE_KEYS, "head_dim", "hidden_act", "rms_norm_eps", "partial_rotary_factor"}
    | {"attention_bias", "mlp_bias"}
)


class LlamaAdapter(StateDictAdapter):
    """Pre-norm, RMSNorm, SwiGLU, rotary positions on head halves, grouped heads (arXiv 2302.13971, 2307.09288)."""

    model_type = "llama"
    head = OUTSIDE["unembedding.weight"]
    derived_names = re.compile(r"rotary_emb\.inv_freq$")
    block: ClassVar[Mapping[str, str]] = BLOCK
    required_fields: ClassVar[Mapping[str, Any]] = FIXED
    known_keys: ClassVar[frozenset[str]] = READS
    rotary_fraction: ClassVar[float | None] = None
    """The part of each head that is rotated where the config.json does not say; None where whole heads are."""

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a LlamaConfig; attention and feed-forward must both have biases, or neither."""
        bias = bool(values.get("attention_bias", False))
        require_allowed(values, {"hidden_act": ("silu",), "mlp_bias": (bias, None)})
        heads = needed(values, "num_attention_heads")
        key_value_heads = heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"]
        rope = read_rope(values, fraction=self.rotary_fraction)
        return DecoderConfig(
            vocab_size=needed(values, "vocab_size"),
            max_seq_len=needed(values, "max_position_embeddings"),
            hidden_size=needed(values, "hidden_size"),
            num_layers=needed(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=key_value_heads,
            head_dim=values.get("head_dim"),
            mechanism="attn-variants/mha" if key_value_heads == heads else "attn-variants/gqa",
            norm="rms",
            norm_eps=values.get("rms_norm_eps", 1e-6),
            feed_forward="swiglu",
            intermediate_size=needed(values, "intermediate_size"),
            positions="rotary",
            rope_theta=rope.base,
            partial_rotary_factor=rope.fraction,
            rope_scaling=rope.scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            bias=bias,
            attention_dropout=values.get("attention_dropout") or 0.0,
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a LlamaConfig, as transformers 5 reads it."""
        require_fields(config, self.required_fields, self.model_type)
        heads = softmax_heads(config, self.mask(config), self.model_type)
        return common_hf_config(config, self.model_type, "LlamaForCausalLM") | {
            "num_key_value_heads": heads.key_value,
            "head_dim": heads.key_size,
            "hidden_act": "silu",
            "rope_parameters": rope_parameters(model_rope(config)),
            "attention_bias": config.bias,
            "mlp_bias": config.bias,
        }

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [StoredTensor(self.hf_name(name), (name,)) for name in parameters]

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a decoder parameter."""
        if ours in OUTSIDE:
            return OUTSIDE[ours]
        _, layer, rest = ours.split(".", 2)
        module, _, leaf = rest.rpartition(".")
        own = self.block.get(rest) or f"{self.block.get(module, module)}.{leaf}"
        return f"model.layers.{layer}.{own}"

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """See `with_base_prefix`."""
        return with_base_prefix(names, OUTSIDE["embedding.weight"], self.head)

    def mask(self, config: DecoderConfig) -> Mask:  # noqa: ARG002  (Mistral's depends on it)
        """The mask that every layer must have."""
        return Causal()


class MistralAdapter(LlamaAdapter):
    """Llama with a sliding window of w tokens, the query's own included (Jiang et al. 2023, arXiv 2310.06825)."""

    model_type = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    known_keys = READS | {"sliding_window"}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a MistralConfig; without `sliding_window` the window is 4096, null is none."""
        values = {**self.defaults, **values}
        config = super().from_hf_config(values)
        window = values.get("sliding_window")
        if window is None:
            return config
        return dataclasses.replace(config, mechanism="attn-variants/sliding_window", options={"window": window})

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a MistralConfig."""
        if config.bias:
            raise Incompatible(f"biases cannot be expressed in a {self.model_type} config.json")
        window = whole(config.options.get("window"))
        return super().keys_of(config) | {"architectures": [self.architecture], "sliding_window": window}

    def mask(self, config: DecoderConfig) -> Mask:
        """The sliding window of the options, or the causal mask without one."""
        window = config.options.get("window")
        return Causal() if window is None else Window(left=window - 1)


# The values of missing keys of a MixtralConfig, in place of a MistralConfig's.
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
EXPERT = re.compile(r"feed_forward\.experts\.(\d+)\.(gate|up|down)\.weight")
MATRIX = {"gate": "w1", "up": "w3", "down": "w2"}


class MixtralAdapter(MistralAdapter):
    """Mistral whose layers route each token to k of E feed-forwards (Jiang et al. 2024, arXiv 2401.04088).

    The weight of the load-balancing loss is not read: in transformers that loss is taken over all layers together.
    """

    model_type = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    defaults = DEFAULTS
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    keys = KEYS | {"num_experts": "num_local_experts"}
    known_keys = MistralAdapter.known_keys | {"num_local_experts", "num_experts_per_tok", "router_jitter_noise"}
    block = BLOCK | {"feed_forward.router.score": "block_sparse_moe.gate"}
    required_fields = {key: value for key, value in FIXED.items() if key != "num_experts"} | {
        "routing": "mixtral",
        "bias": False,
    }

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a MixtralConfig."""
        require_allowed(values, {"router_jitter_noise": (0.0, None), "attention_bias": (False, None)})
        plain = super().from_hf_config(values)
        return dataclasses.replace(
            plain,
            num_experts=values.get("num_local_experts", 8),
            num_experts_per_tok=values.get("num_experts_per_tok", 2),
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a MixtralConfig, as transformers 5 reads it."""
        if config.num_experts is None:
            raise Incompatible("a decoder without experts cannot be expressed in a mixtral config.json")
        return super().keys_of(config) | {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
        }

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a decoder parameter."""
        _, _, rest = ours.partition("blocks.")
        layer, _, rest = rest.partition(".")
        expert = EXPERT.fullmatch(rest)
        if expert is None:
            return super().hf_name(ours)
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert[1]}.{MATRIX[expert[2]]}.weight"
