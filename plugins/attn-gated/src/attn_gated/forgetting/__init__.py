"""Forgetting attention (FoX): softmax attention with data-dependent forget gates."""

from __future__ import annotations

from collections.abc import Mapping
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
    from attn_gated.forgetting.gates import ForgetGates

CARRIED = 3
"""The number of elements that are added to queries and keys of whole sequences, to carry the gates' bias."""


class Forgetting(DeclaredMechanism):
    """Every token has a forget gate; the logarithms of all gates between key and query are added to a score."""

    name = "forgetting"
    splits_heads = True
    summary = "the logarithms of the forget gates between key and query are added to the scores"
    paper = Paper(
        title="Forgetting Transformer: Softmax Attention with a Forget Gate",
        authors="Lin et al.",
        year=2025,
        arxiv="2503.02130",
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + D + M\right) V,\quad"
        r" D_{ij} = \sum_{l=j+1}^{i} \log f_l,\quad f_l = \sigma(w_f^\top x_l + b_f)"
    )
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.SHARES_KV,
        Capability.CHOOSES,
    }

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal softmax attention to which the gates' bias is added."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> ForgetGates:
        """The module of the gates, with random weights."""
        from attn_gated.forgetting.gates import ForgetGates

        return ForgetGates(self.spec(config), config.hidden_size)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The module's own computation, which adds the bias, by torch's fused attention for whole sequences."""
        return (Computation(),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """The logarithm of the gate of every head, in float32, because thousands of them are summed."""
        return {"gate": Field((config.num_heads,), dtype="float32")}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention and of the gates, which always have a bias.

        For whole sequences queries, keys and values have three more elements, which carry the gates' bias.
        """
        flops = 2 * shape.batch * shape.query * config.hidden_size * config.num_heads
        whole = shape.whole
        carried = 2 * shape.batch * shape.query * shape.key * config.num_heads * 2 * CARRIED if whole else 0
        return super().cost(config, shape) + Cost(
            flops=flops + carried, allowed_flops=flops, parameters=(config.hidden_size + 1) * config.num_heads
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Forgetting()]
