"""Attention sinks (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Cost,
    DeclaredMechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    Window,
)
from attn_core.checks import checked, require_whole
from attn_core.masks import Prefix
from attn_core.scores import ScaledDot

from attn_variants.mechanisms.common import DECODER


class AttentionSinks(DeclaredMechanism):
    """Attends to the first tokens and a window of the latest ones: a bounded cache that stays stable on long streams.

    Positions are counted within the cache: the distance to a sink is as if only the window lay in between.
    """

    name = "attention_sinks"
    splits_heads = True
    summary = "a sliding window plus the first tokens (attention sinks), with a cache of constant size"
    paper = Paper(
        title="Efficient Streaming Language Models with Attention Sinks",
        authors="Xiao et al.",
        year=2023,
        arxiv="2309.17453",
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i},\quad"
        r" A_i = \{j \le i : j < s \text{ or } i - j < w\}"
    )
    sketch: ClassVar = {"sinks": 2, "window": 3}
    capabilities = DECODER - {Capability.SHARES_KV}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`sinks` s, the number of first tokens that stay visible; `window` w, that of the latest, including the
        query's own."""

        sinks: int = checked(4, require_whole, ge=1, unit="tokens")
        window: int = checked(1020, require_whole, ge=1, unit="tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec; raises `Incompatible` unless causal, `InvalidValue` unless the key/value heads divide the heads."""
        options, heads = self.Config.of(config), config.head_layout
        mask = Window(left=options.window - 1) | (Prefix(options.sinks) & Causal())
        # The scale is explicit, as the layer doubles the head size of rotated heads; see `AttentionSinksLayer`.
        score = ScaledDot(scale=heads.key_size**-0.5)
        return AttentionSpec(heads=heads, score=score, mask=mask, rotary=config.rotary)

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `AttentionSinksLayer` with randomly initialised weights."""
        from attn_variants.mechanisms.attention_sinks_layer import AttentionSinksLayer

        options = self.Config.of(config)
        return AttentionSinksLayer(
            self.spec(config),
            sinks=options.sinks,
            window=options.window,
            hidden_size=config.hidden_size,
            bias=config.bias,
            dropout=config.dropout,
        )

    def paged_computation(self, config: MechanismConfig) -> None:
        """None, as positions within the cache are computed over gathered rows."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The declared cost; with a rotary embedding, query-key products are twice as wide."""
        declared = super().cost(config, shape)
        if config.rotary is None:
            return declared
        spec = self.spec(config)
        per_key = shape.batch * spec.score.pair_flops(spec.heads)
        return declared + Cost(
            flops=per_key * shape.query * self.met_keys(config, shape),
            allowed_flops=per_key * spec.mask.count(shape.query, shape.key),
            parameters=0,
        )
