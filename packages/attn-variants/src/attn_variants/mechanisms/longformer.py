"""Longformer's attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    Computation,
    Cost,
    DeclaredMechanism,
    Full,
    InnerAttention,
    Mask,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    Window,
)
from attn_core.checks import checked, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks import GlobalTokens, PerHead

from attn_variants.mechanisms.common import ENCODER, whole_numbers


class LongformerAttention(DeclaredMechanism):
    """Each token attends to a window and to global tokens, which attend to all tokens with projections of their own.

    A token that is not global has one softmax over its window and the global keys, with the common projections. If all
    tokens are global this is full attention with the global projections. Besides the positions of the config, a call
    may give global tokens for each sequence: `layer(rows, global_tokens=...)`, bool [batch, token].
    """

    name = "longformer"
    counts_from_start = True  # global tokens are those at the start
    splits_heads = True
    summary = "a sliding window for every token, and a few global tokens"
    paper = Paper(
        title="Longformer: The Long-Document Transformer", authors="Beltagy et al.", year=2020, arxiv="2004.05150"
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i},\quad"
        r" A_i = \{j : |i - j| \le \tfrac{w}{2} d_h,\ d_h \mid i - j\} \cup G \text{ for } i \notin G,\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q^g_i (K^g)^\top}{\sqrt{d_k}}\right) V^g \text{ for } i \in G"
    )
    sketch: ClassVar = {"window": 4}
    capabilities = ENCODER - {Capability.ROTARY}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`window` w is the size of the window, half on either side; `global_positions` G are the positions of global
        tokens, which may exceed a sequence; `dilations` d are those of the heads in turn, 1 for none: a head sees every
        d-th position of a window d times as wide."""

        window: int = checked(512, require_whole, ge=0)
        global_positions: tuple[int, ...] = (0,)
        dilations: tuple[int, ...] = checked((1,), whole_numbers, 1)

        def __post_init__(self) -> None:
            super().__post_init__()
            positions = whole_numbers("global_positions", self.global_positions, 0)
            object.__setattr__(self, "global_positions", tuple(sorted(set(positions))))
            if not self.dilations:
                raise InvalidValue.of("dilations", self.dilations, "at least one")

    drops_weights = True

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec of the attention with the common projections."""
        options = self.Config.of(config)
        half = options.window // 2
        near: list[Mask] = [Window(left=half, right=half, dilation=step) for step in options.dilations]
        if options.global_positions:
            near = [window | GlobalTokens(options.global_positions) for window in near]
        heads = tuple(near[head % len(near)] for head in range(config.num_heads))
        mask = heads[0] if len(set(heads)) == 1 else PerHead(heads)
        return AttentionSpec(heads=config.head_layout, mask=mask)

    def build(self, config: MechanismConfig) -> Any:
        """A new `LongformerLayer`."""
        from attn_variants.mechanisms.longformer_layer import LongformerLayer

        return LongformerLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            inner=self.inner(config),
            dropout=config.dropout,
        )

    def inner(self, config: MechanismConfig) -> InnerAttention:
        """The module that computes the outputs of global tokens with their own projections."""
        from attn_variants.mechanisms.longformer_layer import GlobalAttention

        options = self.Config.of(config)
        return GlobalAttention(
            self.spec(config), options.global_positions, hidden_size=config.hidden_size, bias=config.bias
        )

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """The computation of all tokens, and that of the global tokens with their own projections."""
        own = super().computations(config, tokens)
        if not self.Config.of(config).global_positions:
            return own
        whole = dataclasses.replace(self.spec(config), mask=Full())
        return (*own, Computation(part="global tokens", asked=whole))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The declared cost, and that of the global tokens' own projections and attention."""
        spec, heads = self.spec(config), config.head_layout
        count = sum(position < shape.query for position in self.Config.of(config).global_positions)
        into, memory = heads.query * heads.key_size, heads.key_value * (heads.key_size + heads.value_size)
        tokens = 2 * config.hidden_size * (count * into + shape.key * memory) if count else 0
        flops = shape.batch * (tokens + count * shape.key * spec.pair_flops())
        weights = config.hidden_size * (into + memory) + (into + memory if config.bias else 0)
        # The declared cost already counts the pairs of global rows, which are computed with the common projections too.
        own = Cost(flops=flops, allowed_flops=shape.batch * tokens, parameters=weights)
        return super().cost(config, shape) + own
