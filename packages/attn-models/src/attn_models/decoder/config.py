"""The config of a decoder, and of its mixtures of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core import Rotary
from attn_core.errors import InvalidValue
from attn_core.models import KvSharing, checked_kv_sharing, kv_source_layer_of
from attn_core.rotary import rotary_scaling
from attn_schema.model import MAX_LAYERS

from attn_models.plain_config import (
    plain_fields,
    require_between,
    require_choice,
    require_count,
    require_flag,
    require_word,
    whole,
)

GROUPED = ("deepseek_v2", "deepseek_v3")
"""Routings with groups of experts and a scaling factor."""

ROUTINGS = ("mixtral", "switch", "llama4", *GROUPED)
BIASED = "deepseek_v3"
# Fields that have no effect in a decoder without experts, and the values that they must have there.
NEEDS_EXPERTS = {
    "num_experts_per_tok": None,
    "router_aux_loss_coef": 0.0,
    "router_bias_update_rate": 0.0,
    "n_shared_experts": None,
    "shared_expert_gate": False,
    "router_bias": False,
    "moe_intermediate_size": None,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer, from the fields of `DecoderConfig`.

    There are `count` routed experts of inner size `intermediate_size`. Each token uses `per_token` of them, chosen from
    the best `topk_group` of `groups` groups; their sum is multiplied by `scale`. Every token also uses the `shared`
    experts, multiplied by a sigmoid gate if `gated`. `rate` is the step by which training moves the routing biases,
    `router_aux_loss_coef` the weight of the load-balancing loss, `bias` whether the router has biases.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared: int = 0
    gated: bool = False
    groups: int = 1
    topk_group: int = 1
    scale: float = 1.0
    rate: float = 0.0
    router_aux_loss_coef: float = 0.0
    bias: bool = False


def experts_config(config: DecoderConfig) -> Experts | None:
    """The mixture of experts of the sparse layers; None without experts.

    Raises `InvalidValue` for fields that contradict each other.
    """
    require_between("routed_scaling_factor", config.routed_scaling_factor, 0.0, math.inf)
    require_between("router_bias_update_rate", config.router_bias_update_rate, 0.0, math.inf)
    if config.num_experts is None:
        given = {name: getattr(config, name) for name in NEEDS_EXPERTS}
        if given != NEEDS_EXPERTS:
            changed = {name: value for name, value in given.items() if value != NEEDS_EXPERTS[name]}
            raise InvalidValue.of("num_experts", changed, "a number of experts, or none of these fields")
        return None
    if config.num_experts_per_tok is None or config.num_experts_per_tok > config.num_experts:
        allowed = f"a whole number from 1 to the {config.num_experts} experts"
        raise InvalidValue.of("num_experts_per_tok", config.num_experts_per_tok, allowed)
    if config.shared_expert_gate and config.n_shared_experts is None:
        raise InvalidValue.of("shared_expert_gate", config.shared_expert_gate, "false without n_shared_experts")
    _require_routing(config)
    groups, chosen = _groups(config, config.num_experts, config.num_experts_per_tok)
    return Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size or config.inner_width,
        shared=config.n_shared_experts or 0,
        gated=config.shared_expert_gate,
        groups=groups,
        topk_group=chosen,
        scale=config.routed_scaling_factor,
        rate=config.router_bias_update_rate,
        router_aux_loss_coef=config.router_aux_loss_coef,
        bias=config.router_bias,
    )


def _require_routing(config: DecoderConfig) -> None:
    if config.routing not in GROUPED and (config.n_group is not None or config.routed_scaling_factor != 1):
        allowed = " or ".join(repr(name) for name in GROUPED)
        raise InvalidValue.of("routing", config.routing, f"{allowed} with n_group or routed_scaling_factor")
    if config.routing != BIASED and config.router_bias_update_rate:
        raise InvalidValue.of(
            "router_bias_update_rate",
            config.router_bias_update_rate,
            f"0, unless routing is {BIASED!r}, which has biases",
        )
    if config.first_k_dense_replace not in range(config.num_layers + 1):
        raise InvalidValue.of(
            "first_k_dense_replace",
            config.first_k_dense_replace,
            f"a whole number from 0 to the {config.num_layers} layers",
        )
    require_count("decoder_sparse_step", config.decoder_sparse_step)
    if config.feed_forward == "none":
        raise InvalidValue.of("num_experts", config.num_experts, "none where feed_forward is 'none'")


def _groups(config: DecoderConfig, experts: int, per_token: int) -> tuple[int, int]:
    """The number of expert groups, and the number of groups that a token may choose experts from."""
    groups, chosen = config.n_group, config.topk_group
    if groups is None:
        if chosen is not None:
            raise InvalidValue.of("topk_group", chosen, "null without n_group")
        return 1, 1
    require_count("topk_group", chosen)
    if experts % groups:
        raise InvalidValue.of("n_group", groups, f"a divisor of the {experts} experts")
    if chosen is None or chosen > groups or chosen * (experts // groups) < per_token:
        allowed = f"at most the {groups} groups, and enough of them to contain {per_token} experts"
        raise InvalidValue.of("topk_group", chosen, allowed)
    return groups, chosen


COUNTS = ("vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads")
OPTIONAL_COUNTS = (
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
)
FLAGS = (
    "tie_word_embeddings",
    "bias",
    "rope_interleave",
    "scale_embedding",
    "shared_expert_gate",
    "unembedding_bias",
    "router_bias",
    "embedding_norm",
)
OWN_BIASES = ("norm_bias", "attention_bias", "attention_output_bias", "feed_forward_bias")
"""Fields that say whether a part has biases; None means as `bias` says for all parts."""
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
NORM_PLACES = ("pre", "post", "both", "after", "parallel", "parallel_shared")
WORDS = {
    "norm": ("layer", "rms"),
    "norm_place": NORM_PLACES,
    "feed_forward": ("gelu", "gelu_tanh", "quick_gelu", "relu", *GATED, "none"),
    "positions": ("learned", "sinusoidal", "rotary", "none"),
    "routing": ROUTINGS,
}
SMALLEST_CAP = 1e-3
CHOICE_KEYS = {"mechanism", "options"}
NUMBERS = {
    "norm_eps": (0.0, math.inf),
    "rope_theta": (1.0, math.inf),
    "partial_rotary_factor": (0.0, 1.0 + 1e-9),
    "dropout": (0.0, 1.0),
    "attention_dropout": (0.0, 1.0),
    "router_aux_loss_coef": (0.0, math.inf),
    "nextn_predict_loss_weight": (0.0, math.inf),
    "embedding_multiplier": (0.0, math.inf),
    "residual_multiplier": (0.0, math.inf),
    "logit_scale": (0.0, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A mechanism by name, and its own options.

    Options override, for this layer, the decoder's numbers of heads; `rotary` None turns off rotary positions here.
    """

    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice(self.mechanism, self.options)
        if self.options.get("rotary") is not None:
            raise InvalidValue.of("rotary", self.options["rotary"], "null, for a layer without rotary positions")

    @property
    def has_rotary(self) -> bool:
        """Whether the layer uses the decoder's rotary positions."""
        return "rotary" not in self.options

    @classmethod
    def from_plain(cls, value: object) -> AttentionChoice:
        """The choice from a name alone, or from a mapping with `mechanism` and optionally `options`."""
        if isinstance(value, str):
            return cls(mechanism=value)
        if isinstance(value, Mapping) and isinstance(value.get("mechanism"), str) and value.keys() <= CHOICE_KEYS:
            return cls(mechanism=value["mechanism"], options=value.get("options") or {})
        raise InvalidValue.of("pattern", value, "a mechanism's name, or its `mechanism` and `options`")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: token embeddings, blocks of causal attention and feed-forward layers, and the unembedding.

    Attention: every layer uses `mechanism` with its `options`, unless `pattern` is given: then layer i uses
    `pattern[i % len(pattern)]`. `num_kv_heads` and `head_dim` default to `num_heads` and `hidden_size / num_heads`.
    `kv_sharing[i]` is the layer whose keys and values layer i attends to; by default every layer has its own. "cla:2"
    and "yoco" stand for such lists (`attn_core.models.KvSharing`). `attention_dropout` drops attention weights in
    training, unless the options of a layer have their own `dropout`.

    Positions: `positions` is "learned", "sinusoidal" (fixed, added to embeddings that are multiplied by √width, Vaswani
    et al. 2017), "rotary" or "none", which leaves positions to the mechanism. The fields of rotary positions are
    `rope_theta`, `partial_rotary_factor` (the fraction of a head that is rotated), `rope_interleave` (pairs are
    adjacent elements instead of elements half a head apart) and `rope_scaling` (like the option of the mechanism
    `rope`).

    Blocks: `norm` is "layer" or "rms". `norm_place` "pre" normalises the input of a sublayer (GPT-2), "post" the sum
    with the residual (Vaswani et al. 2017), "both" the input and output of a sublayer (Gemma 2), "after" only its
    output (OLMo 2, arXiv 2501.00656). With "parallel" both sublayers read the block's input, each through its own norm
    (GPT-NeoX, arXiv 2204.06745), with "parallel_shared" through one norm (GPT-J). The output of a sublayer is
    multiplied by `residual_multiplier` before it is added (Granite). `feed_forward` is the activation: "gelu",
    "gelu_tanh", "quick_gelu", "relu", or one with a gate: "swiglu", "geglu", "geglu_tanh", "swiglu_clamped" (gpt-oss);
    "none" leaves feed-forwards and their norms out (Mamba-2, arXiv 2405.21060). `intermediate_size` is the inner size
    of a feed-forward, by default 4 `hidden_size`, or with a gate 8/3 `hidden_size`, rounded up to a multiple of 8.
    `bias` gives biases to projections, feed-forwards and LayerNorms; `attention_bias` (queries, keys, values),
    `attention_output_bias`, `feed_forward_bias` and `norm_bias` override it for their part. `router_bias` and
    `unembedding_bias` do not depend on it. `dropout` applies in training to embeddings and the output of each sublayer.

    Embeddings: `tie_word_embeddings` uses the embedding as the unembedding. `scale_embedding` multiplies embeddings by
    √width (Gemma), `embedding_multiplier` by a number (Granite); `embedding_norm` normalises them (BLOOM). Learned
    positions start at row `position_offset` of their table (OPT). Logits are multiplied by `logit_scale` (Cohere), and
    `final_logit_softcapping` c bounds them to ±c: c tanh(logits / c) (Gemma 2).

    Mixture of experts (arXiv 2401.04088): layer i, counted from 0, is sparse if i >= `first_k_dense_replace` and i + 1
    is a multiple of `decoder_sparse_step` (Qwen2-MoE). A sparse layer has `num_experts` feed-forwards of inner size
    `moe_intermediate_size` (by default that of a dense layer), of which each token uses `num_experts_per_tok`, and
    `n_shared_experts` that every token uses (DeepSeekMoE, arXiv 2401.06066), multiplied by a sigmoid gate of the token
    with `shared_expert_gate` (Qwen2-MoE, arXiv 2407.10671, section 2.2.2). `routing` sets the weights of the chosen
    experts: "mixtral" by a softmax over them, "switch" and "deepseek_v2" by a softmax over all experts, "deepseek_v3"
    by sigmoids normalised to sum to one, with a bias per expert that only affects the choice (arXiv 2412.19437, section
    2.1.2), "llama4" by sigmoids that multiply the inputs of the experts instead of their outputs. The deepseek routings
    choose experts from the best `topk_group` of `n_group` groups, and multiply outputs by `routed_scaling_factor`.
    Training balances the load by an auxiliary loss of weight `router_aux_loss_coef` (arXiv 2101.03961), or by moving
    the biases by `router_bias_update_rate` after each step ("deepseek_v3").

    Multi-token prediction (arXiv 2412.19437, section 2.2): `num_nextn_predict_layers` D adds D modules that predict the
    D tokens after the next; the mean of their losses, times `nextn_predict_loss_weight`, is added to the training loss.
    They are not used outside training.

    Sizes are whole numbers from 1. Raises `InvalidValue` for a field outside its range; `layer_attentions` raises for
    mechanisms that do not fit.
    """

    vocab_size: int
    max_seq_len: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mechanism: str = "attn-variants/mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    pattern: tuple[AttentionChoice, ...] = ()
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_place: str = "pre"
    feed_forward: str = "gelu"
    intermediate_size: int | None = None
    positions: str = "learned"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    rope_interleave: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    position_offset: int = 0
    scale_embedding: bool = False
    embedding_multiplier: float = 1.0
    embedding_norm: bool = False
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    bias: bool = False
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    feed_forward_bias: bool | None = None
    norm_bias: bool | None = None
    unembedding_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    kv_sharing: KvSharing = ()
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    routing: str = "mixtral"
    router_bias: bool = False
    router_aux_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    n_shared_experts: int | None = None
    shared_expert_gate: bool = False
    moe_intermediate_size: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    decoder_sparse_step: int = 1
    num_nextn_predict_layers: int = 0
    nextn_predict_loss_weight: float = 0.3

    def __post_init__(self) -> None:
        for name in (*COUNTS, *(name for name in OPTIONAL_COUNTS if getattr(self, name) is not None)):
            require_count(name, getattr(self, name))
        for name, words in WORDS.items():
            require_word(name, getattr(self, name), words)
        for name in (*FLAGS, *(name for name in OWN_BIASES if getattr(self, name) is not None)):
            require_flag(name, getattr(self, name))
        for name, (low, high) in NUMBERS.items():
            require_between(name, getattr(self, name), low, high)
        require_choice(self.mechanism, self.options)
        self._require_meant()
        if self.final_logit_softcapping is not None:
            require_between("final_logit_softcapping", self.final_logit_softcapping, SMALLEST_CAP, math.inf)
        _ = self.rotary, self.mixture
        if self.num_nextn_predict_layers not in range(min(self.max_seq_len, MAX_LAYERS)):
            allowed = f"a whole number from 0, below {MAX_LAYERS} and the context {self.max_seq_len}"
            raise InvalidValue.of("num_nextn_predict_layers", self.num_nextn_predict_layers, allowed)
        object.__setattr__(self, "kv_sharing", checked_kv_sharing(self.kv_sharing, self.num_layers))
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InvalidValue.of(
                "num_heads", self.num_heads, f"a divisor of hidden_size {self.hidden_size}, or an explicit head_dim"
            )

    def _require_meant(self) -> None:
        """Raise `InvalidValue` for fields that would have no effect in combination with others, or a bad offset."""
        offset: object = self.position_offset
        if not isinstance(offset, int) or offset < 0:
            raise InvalidValue.of("position_offset", offset, "a whole number from 0")
        if self.position_offset and self.positions != "learned":
            raise InvalidValue.of("position_offset", self.position_offset, "0, unless positions are learned")
        if self.unembedding_bias and self.tie_word_embeddings:
            raise InvalidValue.of("unembedding_bias", self.unembedding_bias, "false where tie_word_embeddings is true")
        if self.residual_multiplier != 1 and self.norm_place == "post":
            raise InvalidValue.of("residual_multiplier", self.residual_multiplier, "1 with norm_place 'post'")
        if self.feed_forward == "none" and self.norm_place != "pre":
            raise InvalidValue.of("norm_place", self.norm_place, "'pre' where feed_forward is 'none'")
        if self.logit_scale <= 0:
            raise InvalidValue.of("logit_scale", self.logit_scale, "a number above 0")

    def has_bias(self, part: str) -> bool:
        """Whether a part has biases; `part` is one of `OWN_BIASES`."""
        own: bool | None = getattr(self, part)
        return self.bias if own is None else own

    @property
    def inner_width(self) -> int:
        """The feed-forward's inner width."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return math.ceil(self.hidden_size / 3) * 8 if self.feed_forward in GATED else 4 * self.hidden_size

    @property
    def mixture(self) -> Experts | None:
        """The mixture of experts of the sparse layers; None without experts."""
        return experts_config(self)

    def experts_in(self, layer: int) -> Experts | None:
        """The mixture of experts of one layer; None for a layer with a dense feed-forward."""
        sparse = layer >= self.first_k_dense_replace and (layer + 1) % self.decoder_sparse_step == 0
        return self.mixture if sparse else None

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of the layers; None unless `positions` is "rotary"."""
        if self.positions != "rotary":
            return None
        scaling = None if self.rope_scaling is None else rotary_scaling(self.rope_scaling)
        return Rotary(
            base=self.rope_theta,
            fraction=self.partial_rotary_factor,
            interleaved=self.rope_interleave,
            scaling=scaling,
        )

    def source_layer(self, layer: int) -> int:
        """The layer whose keys and values layer `layer` attends to: `layer` itself if it does not share."""
        return kv_source_layer_of(self.kv_sharing, layer, self.num_layers)

    def choice(self, layer: int) -> AttentionChoice:
        """The mechanism and options of one layer."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        return AttentionChoice(mechanism=self.mechanism, options=self.options)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, the inverse of `from_plain`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        choices = [{"mechanism": choice.mechanism, "options": dict(choice.options)} for choice in self.pattern]
        kv_sharing = self.kv_sharing if isinstance(self.kv_sharing, str) else list(self.kv_sharing)
        return values | {"options": dict(self.options), "pattern": choices, "kv_sharing": kv_sharing}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config from plain values such as JSON's, where whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        plain = plain_fields(cls, values, "a decoder")
        if isinstance(plain.get("kv_sharing"), list):
            plain["kv_sharing"] = [whole(source_layer) for source_layer in plain["kv_sharing"]]
        return cls(
            **plain | {"pattern": tuple(AttentionChoice.from_plain(item) for item in plain.get("pattern") or ())}
        )
