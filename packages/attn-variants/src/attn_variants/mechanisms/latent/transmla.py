"""Grouped heads factorised into a latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import (
    AttentionSpec,
    Capability,
    Computation,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    StateSpecs,
)

from attn_variants.mechanisms.capabilities import SELF
from attn_variants.mechanisms.computed import multi_heads
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole


class FactorisedAttention(ComputedMechanism):
    """What a grouped-query model becomes when the matrices of its keys and values are factorised through one latent.

    With the full rank, 2 · key/value heads · head size, nothing changes; a smaller latent remembers less. Every query
    head has keys and values of its own, which training may then tell apart.
    """

    name = "transmla"
    summary = "keys and values of all heads made from one latent, without a key for positions"
    paper = Paper(
        title="TransMLA: Multi-Head Latent Attention Is All You Need",
        authors="Meng et al.",
        year=2025,
        arxiv="2502.07864",
    )
    equation = (
        r"c_j = W^{D} x_j,\quad k_{hj} = R_j W^{K}_h c_j,\quad v_{hj} = W^{V}_h c_j,\quad"
        r" o_{hi} = \sum_j \mathrm{softmax}_j\left(\frac{(R_i q_{hi})^\top k_{hj}}{\sqrt{d}}\right) v_{hj}"
    )
    capabilities = SELF - {Capability.BORROWS}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`latent` elements are remembered per token."""

        latent: int = 512

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("latent", self.latent, "elements")

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `FactorisedLayer`; raises `InvalidValue` where heads are to share keys."""
        from attn_variants.mechanisms.latent.layers import FactorisedLayer

        sizes = {"width": config.width, "latent": latent_of(config)}
        return FactorisedLayer(self._spec(config), **sizes, bias=config.bias, dropout=config.dropout)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """Multi-head attention over the keys and values that the latents make."""
        return (Computation(part="expanded", asked=self._spec(config)),)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The latent."""
        return {"latent": Paged({"latent": Field((latent_of(config),))})}

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """A step makes the keys and values of all that is remembered anew."""
        heads, width, latent = self._spec(config).heads, config.width, latent_of(config)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        per_query = 2 * width * (into + latent + out)
        tokens = shape.batch * (shape.query * per_query + shape.key * 2 * latent * (into + out))
        pairs = 2 * shape.batch * (into + out)
        return Cost(
            flops=tokens + pairs * shape.query * shape.key,
            allowed_flops=tokens + pairs * self_mask(config).count(shape.query, shape.key),
            parameters=width * (into + latent + out)
            + latent * (into + out)
            + (2 * into + out + width if config.bias else 0),
        )

    def _spec(self, config: MechanismConfig) -> AttentionSpec:
        heads = multi_heads(config, self.name, rotary=True)
        return AttentionSpec(heads=heads, mask=self_mask(config), rotary=config.rotary)


def latent_of(config: MechanismConfig) -> int:
    """The elements of the latent."""
    return FactorisedAttention.Config.of(config).latent
