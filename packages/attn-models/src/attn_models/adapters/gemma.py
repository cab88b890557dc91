"""Gemma 2 and Gemma 3 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attn_core import AttentionSpec, Causal, Rotary, Window
from attn_core.errors import Incompatible
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot
from attn_schema.decoder import AttentionChoice, DecoderConfig

from attn_models.adapters.base import KEYS, StoredTensor, layer_kinds, require_allowed, required_count
from attn_models.adapters.hf_config import (
    Rope,
    common_hf_config,
    read_rope,
    require_fields,
    rope_parameters,
    ropes_of_kinds,
)
from attn_models.adapters.llama import BLOCK, READS, LlamaAdapter
from attn_models.attention import LayerAttention, layer_attentions

MECHANISM = "attn-variants/gemma"


def gemma_options(attention: LayerAttention, layout: str) -> dict[str, Any]:
    """The options, except rotary ones, with which `gemma` computes what the layer computes.

    Compares specs, so that any mechanism with the same spec is accepted. Raises `Incompatible` for other specs.
    """
    spec = attention.mechanism.spec(attention.config)
    options = None if spec is None else _options(spec)
    if spec is None or options is None or spec != _spec_of_options(spec, options):
        name = attention.mechanism.name
        raise Incompatible(f"mechanism {name!r} cannot be expressed in a {layout} config.json", mechanism=name)
    return options


def rotary_of(attention: LayerAttention) -> Rotary | None:
    """The rotary positions of a softmax attention layer; None without any."""
    spec = attention.mechanism.spec(attention.config)
    return None if spec is None else spec.rotary


def _options(spec: AttentionSpec) -> dict[str, Any] | None:
    if not isinstance(spec.score, ScaledDot) or not isinstance(spec.mask, (Causal, Window)):
        return None
    caps = [modifier.cap for modifier in spec.modifiers if isinstance(modifier, SoftCap)]
    return {
        "norm_eps": spec.norm.eps if spec.norm else None,
        "cap": caps[0] if caps else None,
        "window": spec.mask.left + 1 if isinstance(spec.mask, Window) and spec.mask.left is not None else None,
        "scale": spec.score.scale,
    }


def _spec_of_options(spec: AttentionSpec, options: Mapping[str, Any]) -> AttentionSpec:
    """The spec with these options, and the heads, norm and rotary positions of `spec`."""
    window, cap = options["window"], options["cap"]
    return AttentionSpec(
        heads=spec.heads,
        score=ScaledDot(scale=options["scale"]),
        modifiers=() if cap is None else (SoftCap(cap=cap),),
        mask=Causal() if window is None else Window(left=window - 1),
        norm=spec.norm,
        rotary=spec.rotary,
    )


FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATION = "gelu_pytorch_tanh"
FIXED = {
    "norm": "rms",
    "norm_place": "both",
    "feed_forward": "geglu_tanh",
    "positions": "rotary",
    "rope_interleave": False,
    "partial_rotary_factor": 1.0,
    "rope_scaling": None,
    "scale_embedding": True,
    "num_experts": None,
    "num_nextn_predict_layers": 0,
}
OWN = {
    "hidden_activation",
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "rope_local_base_freq",
}
NORMED = ("norm.weight", "attention.norm.", "_norm.weight")


class Gemma2Adapter(LlamaAdapter):
    """Norms around sublayers, GEGLU, soft-capped scores and logits, windows in every other layer (arXiv 2408.00118)."""

    model_type = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    period: ClassVar[int] = 2
    known_keys = READS | OWN
    keys = KEYS | {"cap": "attn_logit_softcapping", "scale": "query_pre_attn_scalar"}
    caps: ClassVar[Mapping[str, float | None]] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    block = BLOCK | {
        "attended_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "fed_norm": "post_feedforward_layernorm",
        "attention.norm.query_gain": "self_attn.q_norm.weight",
        "attention.norm.key_gain": "self_attn.k_norm.weight",
    }

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a Gemma2Config."""
        require_allowed(values, {"use_bidirectional_attention": (False, None), "hidden_activation": (ACTIVATION, None)})
        llama = {"head_dim": 256, "tie_word_embeddings": True, "mlp_bias": values.get("attention_bias", False)}
        plain = super().from_hf_config(llama | dict(values) | {"hidden_act": "silu", "rope_parameters": None})
        ropes = self.ropes(values)
        return dataclasses.replace(
            plain,
            feed_forward="geglu_tanh",
            norm_place="both",
            feed_forward_bias=False,
            scale_embedding=True,
            final_logit_softcapping=self._cap(values, "final_logit_softcapping"),
            mechanism=MECHANISM,
            rope_theta=ropes[FULL].base,
            rope_scaling=None,
            options={},
            pattern=tuple(self._choice(values, kind, ropes) for kind in self._layer_types(values)),
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of this family's config.json, as transformers 5 reads it."""
        require_fields(config, FIXED, self.model_type)
        attentions = layer_attentions(config)
        options = [gemma_options(attention, self.model_type) for attention in attentions]
        kinds = [FULL if chosen["window"] is None else SLIDING for chosen in options]
        windows = {chosen["window"] for chosen in options} - {None}
        common = {(chosen["norm_eps"], chosen["cap"], chosen["scale"]) for chosen in options}
        turns = {(kind, rotary_of(attention)) for kind, attention in zip(kinds, attentions, strict=True)}
        if len(windows) > 1 or len(common) > 1 or len(turns) != len(set(kinds)):
            raise Incompatible(
                f"layers that differ in more than their window cannot be expressed in a {self.model_type}"
            )
        norm_eps, cap, scale = common.pop()
        if norm_eps != self.norm_eps(config.norm_eps):
            raise Incompatible(f"query and key norms of eps {norm_eps} cannot be expressed in a {self.model_type}")
        sizes = common_hf_config(config, self.model_type, self.architecture)
        return sizes | {
            "hidden_activation": ACTIVATION,
            "attention_bias": config.has_bias("attention_bias"),
            "query_pre_attn_scalar": sizes["head_dim"] if scale is None else self._scalar(scale),
            "attn_logit_softcapping": None if cap is None else float(cap),
            "final_logit_softcapping": None
            if config.final_logit_softcapping is None
            else float(config.final_logit_softcapping),
            "sliding_window": windows.pop() if windows else None,
            "layer_types": kinds,
            "rope_parameters": self.hf_ropes(dict(turns), config),
        }

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter; checkpoints store the gains of norms minus 1."""
        return [
            StoredTensor(self.hf_name(name), (name,), offset=1.0 if any(word in name for word in NORMED) else 0.0)
            for name in parameters
        ]

    def ropes(self, values: Mapping[str, Any]) -> dict[str, Rope]:
        """The rotary positions of each kind of layer."""
        rope = read_rope(values)
        return {FULL: rope, SLIDING: rope}

    def hf_ropes(self, turns: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
        """The `rope_parameters` of config.json."""
        if len(set(turns.values())) > 1:
            raise Incompatible(f"layers with rotary positions of their own cannot be expressed in a {self.model_type}")
        return rope_parameters(Rope(base=config.rope_theta))

    def norm_eps(self, eps: float) -> float | None:  # noqa: ARG002  (Gemma 3's norms have the model's)
        """The eps of the norms of queries and keys; None where there are none."""
        return None

    def _scalar(self, scale: float) -> int:
        scalar = round(scale**-2)
        if scalar**-0.5 != scale:
            raise Incompatible(
                f"a scale of {scale} is not 1/√n of a whole number n, as a {self.model_type} config.json requires"
            )
        return scalar

    def _cap(self, values: Mapping[str, Any], key: str) -> float | None:
        cap: float | None = values.get(key, self.caps[key])
        return cap

    def _layer_types(self, values: Mapping[str, Any]) -> list[str]:
        period = required_count(values, "sliding_window_pattern", self.period)
        self.require_period(values)
        return layer_kinds(values, required_count(values, "num_hidden_layers"), (SLIDING, FULL), period)

    def require_period(self, values: Mapping[str, Any]) -> None:
        """Raises `InvalidValue` for a period other than 2: Gemma 2's model ignores this key."""
        require_allowed(values, {"sliding_window_pattern": (self.period, None)})

    def _choice(self, values: Mapping[str, Any], kind: str, ropes: Mapping[str, Rope]) -> AttentionChoice:
        rope = ropes[kind]
        options = {
            "norm_eps": self.norm_eps(values.get("rms_norm_eps", 1e-6)),
            "cap": self._cap(values, "attn_logit_softcapping"),
            "window": values.get("sliding_window", 4096) if kind == SLIDING else None,
            "scale": required_count(values, "query_pre_attn_scalar", 256) ** -0.5,
        }
        if rope.base != ropes[FULL].base:
            options["base"] = rope.base
        if rope.scaling is not None:
            options["scaling"] = rope.scaling
        return AttentionChoice(mechanism=MECHANISM, options=options)


class Gemma3Adapter(Gemma2Adapter):
    """Norms of queries and keys instead of soft caps, five windowed layers to one full layer, each kind with its own
    rotary positions (arXiv 2503.19786). The text model only."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    period = 6
    caps: ClassVar[Mapping[str, float | None]] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a Gemma3TextConfig."""
        require_allowed(values, {"attn_logit_softcapping": (None,)})
        return super().from_hf_config(values)

    def ropes(self, values: Mapping[str, Any]) -> dict[str, Rope]:
        """One object per kind of layer in transformers 5; a local and a global base in transformers 4."""
        return ropes_of_kinds(values, {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)})

    def hf_ropes(self, turns: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
        """The `rope_parameters` of config.json, one object per kind of layer."""
        described = {}
        for kind in (FULL, SLIDING):
            base = turns[kind].base if turns.get(kind) else config.rope_theta
            scaling = next((c.options.get("scaling") for c in config.pattern if _is(c, kind)), None)
            described[kind] = rope_parameters(Rope(base=base, scaling=scaling))
            described[kind].pop("partial_rotary_factor")
        return described

    def require_period(self, values: Mapping[str, Any]) -> None:
        """Accepts any period."""

    def norm_eps(self, eps: float) -> float | None:
        """The eps of the model's other norms."""
        return eps


def _is(choice: AttentionChoice, kind: str) -> bool:
    return (choice.options.get("window") is None) == (kind == FULL)
