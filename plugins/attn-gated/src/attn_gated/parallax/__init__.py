"""Parallax: softmax attention with a learned correction of first order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Computation,
    Cost,
    DeclaredMechanism,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)

if TYPE_CHECKING:
    from attn_gated.parallax.correction import Correction


class Parallax(DeclaredMechanism):
    """A second query of each head says by how much the weight of a key changes for how far the key is from the mean of
    the keys that are attended to; weights still sum to one, but may be negative."""

    name = "parallax"
    splits_heads = True
    summary = "softmax weights, corrected by how far keys are from their mean along a second query"
    paper = Paper(title="Parallax", year=2026, arxiv="2605.29157")
    equation = (
        r"o_i = \sum_j p_{ij} \left(1 + r_i^\top (\bar k_i - k_j)\right) v_j,\quad"
        r" p_i = \mathrm{softmax}\left(\frac{q_i K^\top}{\sqrt{d_k}} + M_i\right),\quad"
        r" \bar k_i = \sum_j p_{ij} k_j,\quad r_i = W_r x_i"
    )
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.SHARES_KV,
        Capability.CHOOSES,
        Capability.NORMALISED,
    }

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal softmax attention that is corrected."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> Correction:
        """The module that corrects weights, with random weights."""
        from attn_gated.parallax.correction import Correction

        return Correction(self.spec(config), config.hidden_size, bias=config.bias)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The module's own computation, as no kernel corrects weights."""
        return (Computation(),)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention, of second queries, and of their products with keys."""
        width = config.num_heads * config.head_layout.key_size
        projected, pair = 2 * shape.batch * shape.query * config.hidden_size * width, 2 * shape.batch * width
        return super().cost(config, shape) + Cost(
            flops=projected + shape.query * shape.key * pair,
            allowed_flops=projected + Causal().count(shape.query, shape.key) * pair,
            parameters=(config.hidden_size + config.bias) * width,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Parallax()]
