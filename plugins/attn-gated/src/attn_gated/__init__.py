"""Gated attention: what each head reads passes a sigmoid gate of the query's own row."""

from __future__ import annotations

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
    hookimpl,
)
from attn_core.errors import InvalidValue

if TYPE_CHECKING:
    from attn_gated.gate import Gate

PER = ("element", "head")


class Gated(DeclaredMechanism):
    """Softmax attention whose outputs are multiplied by σ(x W_g), one gate per element or per head."""

    name = "gated"
    summary = "a sigmoid gate on what every head reads"
    paper = Paper(
        title="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        authors="Qiu et al.",
        year=2025,
        arxiv="2505.06708",
    )
    equation = r"O = \sigma(X W_g) \odot \left(\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V\right)"
    capabilities = frozenset(Capability) - {Capability.CROSS}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`per` "element" gates every element of a head by itself (the paper's best), "head" a head as a whole."""

        per: str = "element"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.per not in PER:
                raise InvalidValue.of("per", self.per, " or ".join(PER))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The softmax attention that is gated."""
        return AttentionSpec(heads=config.head_layout, mask=Causal() if config.causal else Full(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> Gate:
        """The gate with random weights."""
        from attn_gated.gate import Gate

        return Gate(config.width, heads=config.heads, gates=gates_of(config), bias=config.bias)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """That of the softmax attention and of one more projection of the queries' rows."""
        gates = gates_of(config)
        flops = 2 * shape.batch * shape.query * config.width * gates
        biases = gates if config.bias else 0
        gate = Cost(flops=flops, allowed_flops=flops, parameters=config.width * gates + biases)
        return super().cost(config, shape) + gate


def gates_of(config: MechanismConfig) -> int:
    """How many gates one row has."""
    per_head = isinstance(config, Gated.Config) and config.per == "head"
    return config.heads if per_head else config.heads * config.head_layout.value_size


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """What this plugin offers."""
    return [Gated()]
