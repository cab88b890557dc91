"""Efficient attention."""

from __future__ import annotations

from typing import Any

from attn_core import Capability, ComputedMechanism, Cost, Heads, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.computed import multi_heads, projection_biases, projection_weights


class EfficientAttention(ComputedMechanism):
    """Queries are softmaxed over their channels and keys over the tokens, so keys meet values before queries do.

    The second softmax is over the whole sequence: there is no causal form, and nothing to decode.
    """

    name = "efficient"
    summary = "softmaxes of queries and of keys apart: every pair weighted, none computed"
    paper = Paper(
        title="Efficient Attention: Attention with Linear Complexities",
        authors="Shen et al.",
        year=2018,
        arxiv="1812.01243",
    )
    equation = (
        r"O = \rho_q(Q) \left(\rho_k(K)^\top V\right),\quad \rho_q \text{ over channels},\ \rho_k \text{ over tokens}"
    )
    capabilities = frozenset(
        {
            Capability.BIDIRECTIONAL,
            Capability.EXACT,
            Capability.PADDING,
            Capability.WEIGHTS,
            Capability.NORMALISED,
        }
    )

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `EfficientLayer`; raises `InvalidValue` where it is to be causal, else as `heads` does."""
        from attn_variants.mechanisms.recurrences.linear_layers import EfficientLayer

        if config.causal:
            raise InvalidValue.of("causal", config.causal, "False: 'efficient' weighs keys over the whole sequence")
        return EfficientLayer(self.heads(config), width=config.width, bias=config.bias)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections, keys by values, and queries by that."""
        heads = self.heads(config)
        weights = projection_weights(config, heads)
        products = 2 * heads.query * heads.key_size * heads.value_size
        flops = shape.batch * shape.query * 2 * (weights + products)
        return Cost(flops=flops, allowed_flops=flops, parameters=weights + projection_biases(config, heads))

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config; raises as `multi_heads` does."""
        return multi_heads(config, self.name)
