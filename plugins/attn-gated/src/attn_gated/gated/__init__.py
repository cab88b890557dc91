"""Gated attention: the output of each head is multiplied by a sigmoid gate that depends on the query's token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Cost,
    DeclaredMechanism,
    Full,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)
from attn_core.errors import InvalidValue
from attn_core.norms import QkNorm

if TYPE_CHECKING:
    from attn_gated.gated.gate import Gate

PER = ("element", "head")


class Gated(DeclaredMechanism):
    """Softmax attention whose outputs are multiplied by σ(x W_g), one gate per element or per head."""

    name = "gated"
    splits_heads = True
    summary = "a sigmoid gate on the output of each head"
    paper = Paper(
        title="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        authors="Qiu et al.",
        year=2025,
        arxiv="2505.06708",
    )
    equation = r"O = \sigma(X W_g) \odot \left(\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V\right)"
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`per` "element" has a gate for every element of a head (the best in the paper), "head" one for each head.

        With `norm_eps` the queries and keys of every head are normalised first (Qwen3-Next).
        """

        per: str = "element"
        norm_eps: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.per not in PER:
                raise InvalidValue.of("per", self.per, " or ".join(PER))
            eps: object = self.norm_eps
            if eps is not None and (
                isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < math.inf
            ):
                raise InvalidValue.of("norm_eps", eps, "a number above 0, or None for no norms")

    drops_weights = True

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The softmax attention whose output is gated."""
        own = self.Config.of(config)
        return AttentionSpec(
            heads=own.head_layout,
            mask=Causal() if own.causal else Full(),
            norm=None if own.norm_eps is None else QkNorm(eps=own.norm_eps),
            rotary=own.rotary,
        )

    def inner(self, config: MechanismConfig) -> Gate:
        """The module of the gate, with random weights."""
        from attn_gated.gated.gate import Gate

        return Gate(config.hidden_size, heads=config.num_heads, gates=gates_of(config), bias=config.bias)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention and of one more projection of the queries' hidden states."""
        gates = gates_of(config)
        flops = 2 * shape.batch * shape.query * config.hidden_size * gates
        biases = gates if config.bias else 0
        gate = Cost(flops=flops, allowed_flops=flops, parameters=config.hidden_size * gates + biases)
        return super().cost(config, shape) + gate


def gates_of(config: MechanismConfig) -> int:
    """The number of gates per token."""
    per_head = isinstance(config, Gated.Config) and config.per == "head"
    return config.num_heads if per_head else config.num_heads * config.head_layout.value_size


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Gated()]
