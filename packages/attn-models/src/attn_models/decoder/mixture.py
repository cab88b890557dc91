"""The experts of a layer, as data, and what a decoder's config must say of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_between, require_count

if TYPE_CHECKING:
    from attn_models.decoder.config import DecoderConfig

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


def experts_of(config: DecoderConfig) -> Experts | None:
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
