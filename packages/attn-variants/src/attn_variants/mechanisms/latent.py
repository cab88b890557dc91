"""Attention that caches one latent per token: MLA and TransMLA."""

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
    Rotary,
    Shape,
    StateSpecs,
    Step,
)
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import LATENT

from attn_variants.mechanisms.common import SELF, self_mask
from attn_variants.mechanisms.latent_sizes import LatentShape, LatentSizes


class MultiHeadLatentAttention(ComputedMechanism):
    """Multi-head latent attention: keys and values of all heads are projected from one cached latent per token.

    Positions are encoded in a small rotary key beside the latent, shared by all heads. It is rotated by the model's
    rotary embedding if there is one, else by an interleaved one with the option `base`; with neither it is a shared
    part of the keys without positions (Kimi Linear, arXiv 2510.26692).
    """

    name = "mla"
    splits_heads = True
    summary = "caches one latent vector and one rotary key per token, shared by all heads"
    used_by = ("DeepSeek-V3", "Kimi K2")
    paper = Paper(
        title="DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
        authors="DeepSeek-AI",
        year=2024,
        arxiv="2405.04434",
    )
    equation = (
        r"c_j = \mathrm{RMSNorm}(W^{DKV} x_j),\quad k_j = [W^{UK} c_j; R_j W^{KR} x_j],\quad v_j = W^{UV} c_j,\quad"
        r" o_i = \sum_j \mathrm{softmax}_j\left(\frac{q_i^\top k_j}{\sqrt{d_n + d_R}}\right) v_j"
    )
    capabilities = SELF - {Capability.SHARES_KV}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The sizes of DeepSeek-V2 by default; `nope_size` and `value_size` are `head_dim` if they are None.

        `latent` is the size of the latent that is cached for each token, `rotary_size` that of the rotary key beside
        it, whose rotary base is `base`, None for no rotary embedding; `query_latent` compresses the queries too (1536
        in DeepSeek-V2, None in V2 Lite). `norm_eps` is that of both RMSNorms. Scores are multiplied by `score_factor`:
        DeepSeek uses (0.1 ln s + 1)² with YaRN's scaling factor s.
        """

        latent: int = checked(512, require_whole, ge=1, unit="elements")
        rotary_size: int = checked(64, require_whole, ge=1, unit="elements")
        nope_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
        value_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
        query_latent: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
        base: float | None = checked(10000.0, require_number, gt=1, optional=True)
        norm_eps: float = checked(1e-6, require_number, gt=0)
        score_factor: float = checked(1.0, require_number, gt=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.rotary_size % 2:
                raise InvalidValue.of(
                    "rotary_size", self.rotary_size, "an even number, as elements are rotated in pairs"
                )

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `LatentAttentionLayer`; raises the errors of `sizes`."""
        from attn_variants.mechanisms.latent_layers import LatentAttentionLayer

        options = self.Config.of(config)
        shape = LatentShape(
            sizes=self.sizes(config),
            mask=self_mask(config),
            rotary=config.rotary or (None if options.base is None else Rotary(base=options.base, interleaved=True)),
            norm_eps=options.norm_eps,
        )
        return LatentAttentionLayer(shape)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """Multi-head attention over expanded keys and values."""
        return (Computation(part="expanded", asked=self.sizes(config).expanded(self_mask(config))),)

    def paged_computation(self, config: MechanismConfig) -> Computation:
        """Multi-query attention over the cached latents and rotary keys, without expanding them."""
        return Computation(part="absorbed", asked=self.sizes(config).absorbed(self_mask(config)), rows=(LATENT,))

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The normalised latent and the rotated rotary key of each token."""
        sizes = self.sizes(config)
        return {"latent": Paged({"latent": Field((sizes.latent,)), "rotary_key": Field((sizes.rotated,))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the expanded computation for whole sequences, and of the absorbed one for steps with a cache."""
        sizes, hidden_size, heads = self.sizes(config), config.hidden_size, config.num_heads
        up = sizes.latent * heads * (sizes.nope + sizes.value)
        squeezed = sizes.query_latent or 0
        query = (hidden_size + heads * sizes.key) * squeezed if squeezed else hidden_size * heads * sizes.key
        weights = query + hidden_size * sizes.remembered + up + hidden_size * heads * sizes.value
        biases = squeezed + sizes.remembered + hidden_size if config.bias else 0
        per_pair = sizes.key + sizes.value if shape.whole else sizes.remembered + sizes.latent
        # Absorbing costs as much per query as expanding per key: one product with each of the two matrices.
        tokens = 2 * shape.batch * shape.query * weights
        pairs = 2 * shape.batch * heads * per_pair
        return Cost(
            flops=tokens + pairs * shape.query * shape.key,
            allowed_flops=tokens + pairs * self_mask(config).count(shape.query, shape.key),
            parameters=weights + biases + squeezed + sizes.latent,
        )

    def sizes(self, config: MechanismConfig) -> LatentSizes:
        """The sizes of a config; raises `InvalidValue` if it has grouped key/value heads."""
        options, head = self.Config.of(config), config.head_layout
        return LatentSizes(
            config=config,
            latent=options.latent,
            query_latent=options.query_latent,
            rotated=options.rotary_size,
            nope=options.nope_size or head.key_size,
            value=options.value_size or head.value_size,
            score_factor=options.score_factor,
        )


class FactorisedAttention(ComputedMechanism):
    """Grouped-query attention whose key and value matrices are factorised through one latent per token (TransMLA).

    With the full rank, 2 · key/value heads · head size, a converted model is unchanged; a smaller latent shrinks the
    cache. Every query head has its own keys and values, which may become different in training.
    """

    name = "transmla"
    splits_heads = True
    summary = "keys and values of all heads expanded from one latent vector per token, without a separate rotary key"
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
    capabilities = SELF - {Capability.SHARES_KV}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`latent` is the size of the latent that is cached for each token."""

        latent: int = checked(512, require_whole, ge=1, unit="elements")

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `FactorisedLayer`; raises `InvalidValue` if heads are to share keys."""
        from attn_variants.mechanisms.latent_layers import FactorisedLayer

        sizes = {"hidden_size": config.hidden_size, "latent": latent_of(config)}
        return FactorisedLayer(self._spec(config), **sizes, bias=config.bias, dropout=config.dropout)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """Multi-head attention over the keys and values expanded from the latents."""
        return (Computation(part="expanded", asked=self._spec(config)),)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The latent of each token."""
        return {"latent": Paged({"latent": Field((latent_of(config),))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and pairs; a step expands the keys and values of all cached latents again."""
        heads, hidden_size, latent = self._spec(config).heads, config.hidden_size, latent_of(config)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        per_query = 2 * hidden_size * (into + latent + out)
        tokens = shape.batch * (shape.query * per_query + shape.key * 2 * latent * (into + out))
        pairs = 2 * shape.batch * (into + out)
        return Cost(
            flops=tokens + pairs * shape.query * shape.key,
            allowed_flops=tokens + pairs * self_mask(config).count(shape.query, shape.key),
            parameters=hidden_size * (into + latent + out)
            + latent * (into + out)
            + (2 * into + out + hidden_size if config.bias else 0),
        )

    def _spec(self, config: MechanismConfig) -> AttentionSpec:
        heads = config.head_layout
        return AttentionSpec(heads=heads, mask=self_mask(config), rotary=config.rotary)


def latent_of(config: MechanismConfig) -> int:
    """The size of the latent."""
    return FactorisedAttention.Config.of(config).latent
