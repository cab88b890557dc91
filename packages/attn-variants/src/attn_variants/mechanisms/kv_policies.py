"""Policies that keep or read a part of the KV cache, over any softmax attention: SnapKV, TOVA and Quest."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    ComputedMechanism,
    Cost,
    DeclaredMechanism,
    Field,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    installed,
)
from attn_core.checks import checked, require_whole
from attn_core.computation import Computation
from attn_core.cost import SelectedBlockPairs
from attn_core.errors import InvalidValue, UserError

from attn_variants.mechanisms.common import DECODER, Schedule

SCORES = frozenset({"scaled_dot", "dot"})
MODIFIERS = frozenset({"alibi", "soft_cap", "function"})
"""What the attention under a policy may be made of."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(MechanismConfig):
    """`over` is the mechanism whose cache it is: softmax attention with a score of products, declared as a spec."""

    over: str = "gqa"

    def under(self) -> tuple[DeclaredMechanism, MechanismConfig]:
        """The mechanism under the policy and its config; raises `InvalidValue` for one that it cannot be applied to."""
        allowed = "a causal softmax attention that is a spec of products, ALiBi and caps, such as gqa"
        try:
            found = installed().mechanisms.get(self.over)
        except UserError as error:
            raise InvalidValue.of("over", self.over, allowed) from error
        config = dataclasses.replace(found.Config.of(self), num_kv_heads=self.num_kv_heads or self.num_heads)
        if isinstance(found, DeclaredMechanism) and found.inner(config) is None:
            spec = found.spec(config)
            parts = spec.score.kind in SCORES and {part.kind for part in spec.modifiers} <= MODIFIERS
            if parts and (spec.distribution.kind, spec.mask.kind) == ("softmax", "causal"):
                return found, config
        raise InvalidValue.of("over", self.over, allowed)

    def attention(self) -> AttentionSpec:
        """The attention under the policy."""
        found, config = self.under()
        return found.spec(config)


class EvictingPolicy(ComputedMechanism):
    """Base class of policies that drop rows from the cache, in prompts as in decoding."""

    counts_from_start = True  # intervals are counted from the first row
    capabilities = DECODER - {Capability.SHARES_KV} | {Capability.CHOOSES}
    sequential = True
    asks_the_host = True

    Config: ClassVar[type[PolicyConfig]]

    @abstractmethod
    def schedule(self, config: MechanismConfig) -> Schedule:
        """When rows leave, and which."""

    def build(self, config: MechanismConfig) -> Any:
        """A new `EvictingLayer`; raises `InvalidValue` for an attention that the policy cannot be applied to."""
        from attn_variants.mechanisms.kv_policies_layers import EvictingLayer

        spec = self.Config.of(config).attention()
        return EvictingLayer(spec, self.schedule(config), hidden_size=config.hidden_size, bias=config.bias)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The kept keys and values of each key/value head in order, their votes in float32 where they
        are of several tokens, and their positions where a score has a bias."""
        heads, rows = config.head_layout, self.schedule(config).rows
        each = {"key": (heads.key_size,), "value": (heads.value_size,)}
        fields = {name: Field((heads.key_value, rows, *size)) for name, size in each.items()}
        if self.schedule(config).interval > 1:
            fields["votes"] = Field((heads.key_value, rows), dtype="float32")
        if self.Config.of(config).attention().modifiers:
            fields["position"] = Field((heads.key_value, rows), dtype="int32")
        return {"kept": Slot(fields)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, and of pairs with the kept rows; keys after a query are computed, too."""
        schedule, (found, under) = self.schedule(config), self.Config.of(config).under()
        met = allowed = 0
        for start, stop in schedule.pieces(shape.remembered, shape.remembered + shape.query):
            kept, new = schedule.filled(start), stop - start
            met += new * (kept + new)
            allowed += new * kept + new * (new + 1) // 2
        pairs = shape.batch * found.spec(under).pair_flops()
        return found.projection_cost(under, shape) + Cost(
            flops=met * pairs, allowed_flops=allowed * pairs, parameters=0
        )


class SnapKV(EvictingPolicy):
    """After every `interval` tokens, the last queries vote for the keys that stay.

    The paper selects once, at the end of the prompt; here, at multiples of `interval`, so that neither where a prompt
    ends nor how it is chunked changes what is kept, and memory stays bounded.
    """

    name = "snapkv"
    summary = "a cache of which the latest queries choose the keys that stay, after every interval of tokens"
    paper = Paper(
        title="SnapKV: LLM Knows What You are Looking for Before Generation",
        authors="Li et al.",
        year=2024,
        arxiv="2404.14469",
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_{ni} = W \cup \mathrm{top}_{b - w}\; \mathrm{pool}\left(\sum_{t \in W} \alpha_{tj}\right)"
    )
    sketch: ClassVar = {"budget": 4, "interval": 4, "window": 2, "pool": 1}

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyConfig):
        """After every `interval` tokens `budget` keys stay. The queries of the `window` latest of them vote for others,
        and votes are averaged over `pool` keys.
        """

        budget: int = checked(1024, require_whole, ge=1)
        interval: int = checked(1024, require_whole, ge=1)
        window: int = checked(64, require_whole, ge=1)
        pool: int = checked(5, require_whole, ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.window > min(self.budget, self.interval):
                raise InvalidValue.of("window", self.window, "at most the budget and the interval")
            if self.pool % 2 == 0:
                raise InvalidValue.of("pool", self.pool, "an odd number of keys")

    def schedule(self, config: MechanismConfig) -> Schedule:
        """That of the options."""
        own = self.Config.of(config)
        return Schedule(budget=own.budget, interval=own.interval, window=own.window, pool=own.pool)


class Tova(EvictingPolicy):
    """Each token beyond the budget evicts the key with the least weight for the newest query, over all heads."""

    name = "tova"
    counts_from_start = False  # a row leaves with every token
    summary = "a cache of constant size that drops the key with the least weight for the newest query"
    paper = Paper(
        title="Transformers are Multi-State RNNs",
        authors="Oren et al.",
        year=2024,
        arxiv="2401.06104",
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_{i+1} = S_i \cup \{i + 1\} \setminus \arg\min_{j \in S_i,\, j < i} \sum_h \alpha^h_{ij}"
        r" \text{ where } |S_i| > b"
    )
    sketch: ClassVar = {"budget": 4}

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyConfig):
        """`budget` keys stay."""

        budget: int = checked(1024, require_whole, ge=1)

    def schedule(self, config: MechanismConfig) -> Schedule:
        """A row leaves with every token."""
        return Schedule(budget=self.Config.of(config).budget, together=True)


class Quest(DeclaredMechanism):
    """The whole cache stays; each query reads its own page and those whose keys may have the largest products with it.

    A page's bound is the product of the query with the largest or smallest of its keys in each element.
    """

    name = "quest"
    counts_from_start = True  # pages are counted from the first row
    summary = "attention to a query's own page of the cache and to those with the largest bounds of their scores"
    paper = Paper(
        title="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        authors="Tang et al.",
        year=2024,
        arxiv="2406.10774",
    )
    equation = (
        r"O_i = \mathrm{softmax}\left(\frac{q_i K_{I_i}^\top}{\sqrt{d_k}} + M\right) V_{I_i},\quad"
        r" I_i = \{j : \lfloor j/B \rfloor \in \{\lfloor i/B \rfloor\} \cup \mathrm{top}_{k-1,\, b}"
        r" \sum_d \max(q_{id} \min_{s \in b} k_{sd},\, q_{id} \max_{s \in b} k_{sd})\}"
    )
    sketch: ClassVar = {"block": 2, "top": 3}
    capabilities = DECODER - {Capability.SHARES_KV} | {Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(PolicyConfig):
        """Pages have `block` keys; a query reads at most `top` of them, its own included."""

        block: int = checked(16, require_whole, ge=1)
        top: int = checked(64, require_whole, ge=1)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention under the policy."""
        return self.Config.of(config).attention()

    def inner(self, config: MechanismConfig) -> Any:
        """The choice of pages, and the attention to them."""
        from attn_variants.mechanisms.kv_policies_layers import PagesInner

        own = self.Config.of(config)
        return PagesInner(self.spec(config), block=own.block, top=own.top)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The choice of pages and the attention to them by the mechanism's own module."""
        return (Computation(part="bounds and chosen pages"),)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, two products for the bound of each page, and all pairs, as pages that were not
        chosen are computed, too; those of chosen pages alone are allowed."""
        own, spec = self.Config.of(config), self.spec(config)
        pages = shape.batch * shape.query * -(-shape.key // own.block)
        bound, pair = 4 * spec.heads.query * spec.heads.key_size, spec.pair_flops()
        chosen = SelectedBlockPairs(block=own.block, top=own.top)
        met = shape.batch * shape.query * self.met_keys(config, shape)
        allowed = chosen.past(shape) * bound + chosen.allowed(shape) * pair
        cost = Cost(flops=pages * bound + met * pair, allowed_flops=allowed, parameters=0)
        return self.projection_cost(config, shape) + cost
