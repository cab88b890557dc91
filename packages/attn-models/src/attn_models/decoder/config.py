"""The config of a decoder, and of its mixtures of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core import Rotary
from attn_core.errors import InvalidValue
from attn_core.models import Lenders, checked_lenders, lender_of
from attn_core.rotary import rotary_scaling

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
"""Routings that can be held to a few groups of experts and weigh their sum."""

ROUTINGS = ("mixtral", "switch", *GROUPED)
BIASED = "deepseek_v3"
# Fields that mean nothing to a decoder without experts, and their values there.
NEEDS_EXPERTS = {
    "experts_per_token": None,
    "balance": 0.0,
    "balance_rate": 0.0,
    "shared_experts": None,
    "shared_gate": False,
    "expert_hidden": None,
    "expert_groups": None,
    "groups_per_token": None,
    "routed_scale": 1.0,
    "dense_layers": 0,
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How many feed-forwards a layer has, of which inner width, and how many of them a token uses.

    `shared` counts those that every token uses beside its own, `gated` by a factor from 0 to 1 that it says itself.
    A token chooses among the experts of `groups_per_token` of the `groups` alone. What the chosen say is multiplied by
    `scale`. `rate` is by how much a step of training moves the bias of an expert that has too much or too little to do,
    `balance` the weight of the loss that spreads tokens.
    """

    count: int
    per_token: int
    hidden: int
    shared: int = 0
    gated: bool = False
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    rate: float = 0.0
    balance: float = 0.0


def experts_config(config: DecoderConfig) -> Experts | None:
    """The experts of every layer after the dense ones; None where each has one feed-forward for all tokens.

    Raises `InvalidValue` for fields that contradict each other.
    """
    require_between("routed_scale", config.routed_scale, 0.0, math.inf)
    require_between("balance_rate", config.balance_rate, 0.0, math.inf)
    if config.experts is None:
        given = {name: getattr(config, name) for name in NEEDS_EXPERTS}
        if given != NEEDS_EXPERTS:
            said = {name: value for name, value in given.items() if value != NEEDS_EXPERTS[name]}
            raise InvalidValue.of("experts", said, "a number of experts beside these, or neither of them")
        return None
    if config.experts_per_token is None or config.experts_per_token > config.experts:
        allowed = f"a whole number from 1 to the {config.experts} experts"
        raise InvalidValue.of("experts_per_token", config.experts_per_token, allowed)
    if config.shared_gate and config.shared_experts is None:
        raise InvalidValue.of("shared_gate", config.shared_gate, "false, where there are no shared_experts")
    _require_routing(config)
    groups, chosen = _groups(config, config.experts, config.experts_per_token)
    return Experts(
        count=config.experts,
        per_token=config.experts_per_token,
        hidden=config.expert_hidden or config.inner_width,
        shared=config.shared_experts or 0,
        gated=config.shared_gate,
        groups=groups,
        groups_per_token=chosen,
        scale=config.routed_scale,
        rate=config.balance_rate,
        balance=config.balance,
    )


def _require_routing(config: DecoderConfig) -> None:
    if config.routing not in GROUPED and (config.expert_groups is not None or config.routed_scale != 1):
        allowed = " or ".join(repr(name) for name in GROUPED)
        raise InvalidValue.of("routing", config.routing, f"{allowed}, where there are expert_groups or a routed_scale")
    if config.routing != BIASED and config.balance_rate:
        raise InvalidValue.of("balance_rate", config.balance_rate, f"0, unless routing is {BIASED!r}, which has biases")
    if config.dense_layers not in range(config.layers + 1):
        raise InvalidValue.of(
            "dense_layers", config.dense_layers, f"a whole number from 0 to the {config.layers} layers"
        )


def _groups(config: DecoderConfig, experts: int, per_token: int) -> tuple[int, int]:
    """The number of groups, and to how many of them a token is held."""
    groups, chosen = config.expert_groups, config.groups_per_token
    if groups is None:
        if chosen is not None:
            raise InvalidValue.of("groups_per_token", chosen, "a number beside expert_groups, or neither of them")
        return 1, 1
    require_count("groups_per_token", chosen)
    if experts % groups:
        raise InvalidValue.of("expert_groups", groups, f"a divisor of the {experts} experts")
    if chosen is None or chosen > groups or chosen * (experts // groups) < per_token:
        allowed = f"at most the {groups} groups, and enough of them for {per_token} experts"
        raise InvalidValue.of("groups_per_token", chosen, allowed)
    return groups, chosen


COUNTS = ("vocabulary", "context", "width", "layers", "heads")
OPTIONAL_COUNTS = (
    "key_value_heads",
    "head_size",
    "hidden",
    "experts",
    "experts_per_token",
    "shared_experts",
    "expert_hidden",
    "expert_groups",
)
FLAGS = ("tied", "bias", "rotary_interleaved", "scaled_embedding", "shared_gate")
WORDS = {
    "norm": ("layer", "rms"),
    "norm_place": ("pre", "post", "both"),
    "feed_forward": ("gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh"),
    "positions": ("learned", "sinusoidal", "rotary", "none"),
    "routing": ROUTINGS,
}
GATED = ("swiglu", "geglu", "geglu_tanh")
SMALLEST_CAP = 1e-3
CHOICE_KEYS = {"mechanism", "options"}
NUMBERS = {
    "norm_eps": (0.0, math.inf),
    "rotary_base": (1.0, math.inf),
    "rotary_fraction": (0.0, 1.0 + 1e-9),
    "dropout": (0.0, 1.0),
    "attention_dropout": (0.0, 1.0),
    "balance": (0.0, math.inf),
    "prediction_weight": (0.0, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A mechanism by name, and its own options.

    Options also replace, in this layer, what the decoder says of heads; `rotary` None leaves out its rotary positions.
    """

    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice(self.mechanism, self.options)
        if self.options.get("rotary") is not None:
            raise InvalidValue.of("rotary", self.options["rotary"], "null, for a layer that turns nothing")

    @property
    def turns(self) -> bool:
        """Whether the layer is given the decoder's rotary positions."""
        return "rotary" not in self.options

    @classmethod
    def from_plain(cls, value: object) -> AttentionChoice:
        """The choice of a name alone, or of an object with `mechanism` and perhaps `options`."""
        if isinstance(value, str):
            return cls(mechanism=value)
        if isinstance(value, Mapping) and isinstance(value.get("mechanism"), str) and value.keys() <= CHOICE_KEYS:
            return cls(mechanism=value["mechanism"], options=value.get("options") or {})
        raise InvalidValue.of("pattern", value, "a mechanism's name, or its `mechanism` and `options`")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A stack of blocks of causal attention and feed-forward layers over token embeddings.

    `mechanism` and its `options` are used by every layer, or layer i uses `pattern[i % len(pattern)]` where a
    pattern is given. `key_value_heads` and `head_size` default to `heads` and `width / heads`. `hidden` is the
    feed-forward's inner width, by default 4 `width`, or 8/3 of it, rounded up to a multiple of 8, for the
    three matrices of SwiGLU and GEGLU. `norm_place` "pre" normalises what enters a sublayer (GPT-2), "post" what
    leaves the residual sum (Vaswani et al. 2017), "both" what enters a sublayer and what it adds (Gemma 2).
    `positions` "sinusoidal" adds fixed waves to embeddings that are multiplied by √width (Vaswani et al. 2017);
    "none" leaves positions to the mechanism. `rotary_scaling` stretches rotary positions, as the option of `rope`
    does. `tied` uses the embedding as the unembedding; `scaled_embedding` multiplies embeddings by √width (Gemma).
    `logit_cap` c keeps logits within ±c by a tanh (Gemma 2). `bias` gives biases to projections, feed-forwards and
    LayerNorms. `dropout` acts in training on the embeddings and on what each sublayer adds,
    `attention_dropout` on attention weights (in a layer whose options say `dropout`, as much as they say). Layer i
    attends to the keys and values of layer `lenders[i]`, or every layer to its own where there are none; "cla:2" and
    "yoco" say this of all layers (`attn_core.models.Lenders`).

    `experts` gives every layer so many feed-forwards, each of the inner width, of which a token uses the
    `experts_per_token` best (arXiv 2401.04088). `routing` says what weighs them: "mixtral" a softmax over the chosen,
    "switch" their part of a softmax over all. `balance` is the weight, in training, of the loss that spreads tokens
    over the experts (arXiv 2101.03961). DeepSeekMoE (arXiv 2401.06066) has small experts, of inner width
    `expert_hidden`, and `shared_experts` that every token uses, with `shared_gate` as much as a sigmoid of the token
    says (Qwen2-MoE, arXiv 2407.10671, section 2.2.2); its first `dense_layers` have one feed-forward of the
    width `hidden`. A token is held to the best `groups_per_token` of the `expert_groups`, and what its experts say is
    multiplied by `routed_scale`: routing "deepseek_v2" weighs as "switch", "deepseek_v3" by sigmoids made to sum to
    one, chosen with a bias for each expert that training moves by `balance_rate` (arXiv 2412.19437, section 2.1.2).

    `prediction_depth` D adds D modules that predict the D tokens after the next (arXiv 2412.19437, section 2.2); the
    mean of their losses enters that of training with `prediction_weight`. Nothing else uses them.

    Raises `InvalidValue` for a field outside its range; what the mechanisms say is asked by `layer_attentions`.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    head_size: int | None = None
    mechanism: str = "mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    pattern: tuple[AttentionChoice, ...] = ()
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_place: str = "pre"
    feed_forward: str = "gelu"
    hidden: int | None = None
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    rotary_scaling: Mapping[str, Any] | None = None
    scaled_embedding: bool = False
    logit_cap: float | None = None
    tied: bool = True
    bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    lenders: Lenders = ()
    experts: int | None = None
    experts_per_token: int | None = None
    routing: str = "mixtral"
    balance: float = 0.0
    balance_rate: float = 0.0
    shared_experts: int | None = None
    shared_gate: bool = False
    expert_hidden: int | None = None
    expert_groups: int | None = None
    groups_per_token: int | None = None
    routed_scale: float = 1.0
    dense_layers: int = 0
    prediction_depth: int = 0
    prediction_weight: float = 0.3

    def __post_init__(self) -> None:
        for name in COUNTS:
            require_count(name, getattr(self, name))
        for name in OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        for name, words in WORDS.items():
            require_word(name, getattr(self, name), words)
        for name in FLAGS:
            require_flag(name, getattr(self, name))
        for name, (low, high) in NUMBERS.items():
            require_between(name, getattr(self, name), low, high)
        require_choice(self.mechanism, self.options)
        if self.logit_cap is not None:
            require_between("logit_cap", self.logit_cap, SMALLEST_CAP, math.inf)
        _ = self.rotary, self.mixture
        if self.prediction_depth not in range(self.context):
            allowed = f"a whole number from 0, below the context {self.context}"
            raise InvalidValue.of("prediction_depth", self.prediction_depth, allowed)
        object.__setattr__(self, "lenders", checked_lenders(self.lenders, self.layers))
        if self.head_size is None and self.width % self.heads:
            raise InvalidValue.of("heads", self.heads, f"a divisor of the width {self.width}, or an explicit head_size")

    @property
    def inner_width(self) -> int:
        """The feed-forward's inner width."""
        if self.hidden is not None:
            return self.hidden
        return math.ceil(self.width / 3) * 8 if self.feed_forward in GATED else 4 * self.width

    @property
    def mixture(self) -> Experts | None:
        """The experts of every layer after the dense ones; None where each has one feed-forward for all tokens."""
        return experts_config(self)

    def experts_in(self, layer: int) -> Experts | None:
        """The experts of one layer; None where it has one feed-forward for all tokens."""
        return self.mixture if layer >= self.dense_layers else None

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions that every layer is given, if any."""
        if self.positions != "rotary":
            return None
        scaling = None if self.rotary_scaling is None else rotary_scaling(self.rotary_scaling)
        return Rotary(
            base=self.rotary_base,
            fraction=self.rotary_fraction,
            interleaved=self.rotary_interleaved,
            scaling=scaling,
        )

    def lender(self, layer: int) -> int:
        """The layer whose keys and values this one attends to: itself where it does not borrow."""
        return lender_of(self.lenders, layer, self.layers)

    def choice(self, layer: int) -> AttentionChoice:
        """The mechanism and options of one layer."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        return AttentionChoice(mechanism=self.mechanism, options=self.options)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, which `from_plain` turns back."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        choices = [{"mechanism": choice.mechanism, "options": dict(choice.options)} for choice in self.pattern]
        lenders = self.lenders if isinstance(self.lenders, str) else list(self.lenders)
        return values | {"options": dict(self.options), "pattern": choices, "lenders": lenders}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config of plain values, such as JSON's, whose whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        plain = plain_fields(cls, values, "a decoder")
        if isinstance(plain.get("lenders"), list):
            plain["lenders"] = [whole(lender) for lender in plain["lenders"]]
        return cls(
            **plain | {"pattern": tuple(AttentionChoice.from_plain(item) for item in plain.get("pattern") or ())}
        )
