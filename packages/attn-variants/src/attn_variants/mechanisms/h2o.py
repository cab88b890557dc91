"""Heavy hitters (H2O)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    Window,
)
from attn_core.checks import checked, require_whole

from attn_variants.mechanisms.common import DECODER
from attn_variants.mechanisms.multi_head import GroupedQueryAttention

FULL = GroupedQueryAttention()
"""The attention over all keys that H2O restricts."""


class HeavyHitters(ComputedMechanism):
    """The cache keeps the latest keys and the heavy hitters, earlier keys with the most accumulated attention.

    The cache of each key/value head has a fixed size: each token beyond it evicts one key, also in training, so that a
    prompt in chunks has the same result as the whole prompt.
    """

    name = "h2o"
    splits_heads = True
    summary = "the latest keys and those with the largest accumulated weights, with a cache of constant size"
    paper = Paper(
        title="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        authors="Zhang et al.",
        year=2023,
        arxiv="2306.14048",
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_{i+1} = S_i \cup \{i + 1\} \setminus \arg\min_{j \in S_i,\, j \le i - r} \sum_{t \le i} \alpha_{tj}"
        r" \text{ where } |S_i| > h + r"
    )
    sketch: ClassVar = {"heavy": 2, "recent": 3}
    capabilities = DECODER - {Capability.SHARES_KV} | {Capability.CHOOSES}
    sequential = True

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`heavy` h, the number of keys kept for their accumulated attention; `recent` r, the number of latest keys,
        including the query's own."""

        heavy: int = checked(512, require_whole, ge=0, unit="keys")
        recent: int = checked(512, require_whole, ge=1, unit="keys")

    def build(self, config: MechanismConfig) -> Any:
        """A new `HeavyHitterLayer`; raises `Incompatible` unless causal, `InvalidValue` unless the key/value heads
        divide the heads."""
        from attn_variants.mechanisms.h2o_layer import Budget, HeavyHitterLayer

        own = self.Config.of(config)
        budget = Budget(heavy=own.heavy, recent=own.recent)
        return HeavyHitterLayer(FULL.spec(full(config)), budget, hidden_size=config.hidden_size, bias=config.bias)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The kept keys and values of each head, the attention accumulated by each, in float32 as it is a sum over all
        queries, and their positions."""
        heads, rows = config.head_layout, self.rows(config)
        return {
            "kept": Slot(
                {
                    "key": Field((heads.key_value, rows, heads.key_size)),
                    "value": Field((heads.key_value, rows, heads.value_size)),
                    "accumulated": Field((heads.key_value, rows), dtype="float32"),
                    "position": Field((heads.key_value, rows), dtype="int32"),
                }
            )
        }

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and pairs: all pairs of whole sequences, whose scores are computed twice if they
        exceed the budget, to find the kept keys; in steps, all rows of the cache, filled or not, and the new key."""
        spec, rows = FULL.spec(full(config)), self.rows(config)
        whole = isinstance(shape, Shape)
        per_pair = spec.pair_flops() + (spec.score.pair_flops(spec.heads) if whole and shape.key > rows else 0)
        keys = shape.key if whole else rows + 1
        left = Window(left=rows).count(shape.query, shape.key)
        pairs = Cost(
            flops=shape.batch * shape.query * keys * per_pair,
            allowed_flops=shape.batch * left * spec.pair_flops(),
            parameters=0,
        )
        return FULL.projection_cost(full(config), shape) + pairs

    def rows(self, config: MechanismConfig) -> int:
        """The number of keys that a head keeps."""
        own = self.Config.of(config)
        return own.heavy + own.recent


def full(config: MechanismConfig) -> MechanismConfig:
    """The config of the attention that keeps all keys."""
    return dataclasses.replace(
        GroupedQueryAttention.Config.of(config), num_kv_heads=config.num_kv_heads or config.num_heads
    )
