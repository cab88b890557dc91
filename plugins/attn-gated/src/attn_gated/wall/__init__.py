"""Wall attention: softmax attention whose scores decay channel by channel between key and query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Computation,
    Cost,
    DeclaredMechanism,
    Field,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)

if TYPE_CHECKING:
    from attn_gated.wall.decay import ChannelGates

TILE = 64
"""The number of queries that are computed at once, pairwise among themselves."""


class Wall(DeclaredMechanism):
    """Every token has a forget gate for each channel of each head; a channel's part of a score is multiplied by all
    gates between key and query."""

    name = "wall"
    splits_heads = True
    summary = "each channel of a score is multiplied by its own forget gates between key and query"
    paper = Paper(title="Wall Attention", authors="Averbuch and Pai", year=2026)
    equation = (
        r"O = \mathrm{softmax}\left(A + M\right) V,\quad"
        r" A_{ij} = \frac{1}{\sqrt{d_k}} \sum_n q_{in} k_{jn} \exp\left(\sum_{l=j+1}^{i} \log f_{ln}\right) + D_{ij},"
        r"\quad D_{ij} = \sum_{l=j+1}^{i} \log s_l,\quad f_l = \sigma(W_f x_l + b_f),\quad"
        r" s_l = \sigma(w_s^\top x_l + b_s)"
    )
    # Rotary positions mix channels, which then decay by different gates: scores would depend on where a text starts.
    capabilities = frozenset(Capability) - {
        Capability.ROTARY,
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.SHARES_KV,
        Capability.CHOOSES,
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`gate_init_bias` is the first bias of all gates, so that hardly anything is forgotten at first. With
        `scalar_gate` a gate per head, as in `forgetting`, adds D to the scores; else D is 0.
        """

        gate_init_bias: float = 8.0
        scalar_gate: bool = False

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal softmax attention whose scores decay."""
        return AttentionSpec(heads=config.head_layout, mask=Causal())

    def inner(self, config: MechanismConfig) -> ChannelGates:
        """The module of the gates, with random weights."""
        from attn_gated.wall.decay import ChannelGates

        own = self.Config.of(config)
        return ChannelGates(
            self.spec(config), config.hidden_size, own.gate_init_bias, scalar=own.scalar_gate, most=TILE
        )

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The module's own computation, as no kernel lets channels decay."""
        return (Computation(),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """The logarithms of all gates, in float32, because thousands of them are summed."""
        shapes: dict[str, tuple[int, ...]] = {"gate": (config.num_heads, config.head_layout.key_size)}
        if self.Config.of(config).scalar_gate:
            shapes["scalar"] = (config.num_heads,)
        return {name: Field(shape, dtype="float32") for name, shape in shapes.items()}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention, of the gates, and of pairs within a tile of queries, which are met twice."""
        heads, size, value = config.num_heads, config.head_layout.key_size, config.head_layout.value_size
        gates = heads * (size + self.Config.of(config).scalar_gate)
        flops = 2 * shape.batch * shape.query * config.hidden_size * gates
        whole, rest = divmod(shape.query, TILE)
        block = 1 << max(0, rest - 1).bit_length()
        near = whole * TILE * ((TILE - 1) * size + 2 * TILE * value) + block * (block - 1) * size + 2 * rest**2 * value
        return super().cost(config, shape) + Cost(
            flops=flops + shape.batch * heads * near,
            allowed_flops=flops,
            parameters=(config.hidden_size + 1) * gates,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Wall()]
