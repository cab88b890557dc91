"""Low-rank attention: Linformer, Nyströmformer and truncated singular value decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Capability, Cost, MechanismConfig, Paper, Shape, Step
from attn_core.checks import checked, require_choice, require_whole
from attn_core.errors import Incompatible, InvalidValue

from attn_variants.mechanisms.whole_sequence import WHOLE_SEQUENCE, WholeSequence

SHARING = {"none": (None, 2), "heads": (1, 2), "keys_values": (1, 1), "layers": (1, 1)}
"""For each sharing: the number of sets of projections, None for one per head, and of kinds, 2 if keys and values have
their own, 1 if they share one."""


class Linformer(WholeSequence):
    """Keys and values are projected along the length to a fixed number of rows, so time is linear in the length.

    Every row is a mixture of all tokens, so there is no causal form. With `sharing` "layers" the first layer of a model
    owns the matrix E = F that all of its layers use.
    """

    name = "linformer"
    counts_from_start = True  # positions have projections of their own
    splits_heads = True
    summary = "keys and values are projected along the sequence to a fixed length"
    paper = Paper(
        title="Linformer: Self-Attention with Linear Complexity", authors="Wang et al.", year=2020, arxiv="2006.04768"
    )
    equation = (
        r"o = \mathrm{softmax}\left(\frac{Q (E^\top K)^\top}{\sqrt{d}}\right) F^\top V,\quad E, F \in R^{n \times k}"
    )
    sketch: ClassVar = {"rank": 4}
    capabilities = WHOLE_SEQUENCE | {Capability.EXACT}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` k is the number of projected rows; `length` n the longest sequence, by default the model's context
        length, or 512; `sharing` of E and F is "none" (each head has its own), "heads" (one E and one F for all heads),
        "keys_values" (E = F for all heads) or "layers" (E = F for all layers)."""

        rank: int = checked(128, require_whole, ge=1, unit="rows")
        length: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)
        sharing: str = checked("heads", require_choice, SHARING)

    def attention(self, config: MechanismConfig) -> Any:
        """New projections of the length, or a reference to those of the first layer."""
        from attn_variants.mechanisms.low_rank_layers import LengthProjection, SharedLengthProjection

        if borrows(config):
            return SharedLengthProjection()
        sets, kinds = SHARING[self.Config.of(config).sharing]
        return LengthProjection(
            length=length_of(config), rank=self.Config.of(config).rank, sets=sets or config.num_heads, kinds=kinds
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections of inputs and of the length, and of pairs of queries and projected rows."""
        heads, size = self.inner_size(config)
        rank, (sets, kinds) = self.Config.of(config).rank, SHARING[self.Config.of(config).sharing]
        flops = self.projected(config, shape) + 8 * shape.batch * heads * shape.query * rank * size
        own = 0 if borrows(config) else kinds * (sets or heads) * length_of(config) * rank
        weights = self.weights(config) + own
        return Cost(flops=flops, allowed_flops=flops, parameters=weights)

    def share_weights(self, layers: Sequence[tuple[MechanismConfig, Any]]) -> None:
        """Share the projections of the first layer with all layers whose `sharing` is "layers".

        Raises `Incompatible` unless the first layer of the model is one of these, with the same rank and length.
        """
        sharing = [(config, layer) for config, layer in layers if self.Config.of(config).sharing == "layers"]
        if not sharing:
            return
        first, owner = sharing[0]
        sizes = self.Config.of(first).rank, length_of(first)
        for config, layer in sharing:
            if borrows(first) or (self.Config.of(config).rank, length_of(config)) != sizes:
                message = "sharing 'layers' needs a first layer with sharing 'layers' and the same rank and length"
                raise Incompatible(message, mechanism=self.name)
            if layer is not owner:
                layer.inner.use(owner.inner)


def borrows(config: MechanismConfig) -> bool:
    """Whether the layer uses the projections of the first layer."""
    return config.layer > 0 and Linformer.Config.of(config).sharing == "layers"


def length_of(config: MechanismConfig) -> int:
    """The length of the longest sequence."""
    return Linformer.Config.of(config).length or config.max_seq_len or 512


class NystromAttention(WholeSequence):
    """Approximates the matrix of softmax attention from the rows and columns of a few landmarks.

    Landmarks are means of equal segments of the real tokens, so they depend on the length, and there is no causal form.
    With as many landmarks as tokens it is softmax attention, up to the convergence of the inverse.
    """

    name = "nystrom"
    splits_heads = True
    summary = "softmax attention approximated with landmarks and the pseudo-inverse of their attention matrix"
    paper = Paper(
        title="Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        authors="Xiong et al.",
        year=2021,
        arxiv="2102.03902",
    )
    equation = (
        r"o = \mathrm{softmax}(Q \tilde K^\top)\, \mathrm{softmax}(\tilde Q \tilde K^\top)^{+}\,"
        r" \mathrm{softmax}(\tilde Q K^\top) V + \mathrm{conv}(V)"
    )
    sketch: ClassVar = {"landmarks": 4, "kernel": 3}
    capabilities = WHOLE_SEQUENCE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`landmarks` is the number of landmarks; `iterations`, those of the inverse; `kernel`, the odd size of the
        convolution in tokens, 0 for none."""

        landmarks: int = checked(64, require_whole, ge=1, unit="rows")
        iterations: int = checked(6, require_whole, ge=1, unit="steps")
        kernel: int = 33

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.kernel != 0 and (self.kernel < 0 or self.kernel % 2 != 1):
                raise InvalidValue.of("kernel", self.kernel, "an odd number of tokens, or 0 for no convolution")

    def attention(self, config: MechanismConfig) -> Any:
        """The landmark attention, with the convolution if there is one."""
        from attn_variants.mechanisms.low_rank_layers import Landmarks

        options = self.Config.of(config)
        return Landmarks(
            heads=config.num_heads,
            landmarks=options.landmarks,
            iterations=options.iterations,
            kernel=options.kernel or None,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, of token-landmark products, of the iterated inverse and of the convolution."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        marks, tokens = options.landmarks, shape.query
        between = 4 * tokens * marks * size + tokens * marks**2
        among = marks**2 * size + 4 * options.iterations * marks**3
        inner = 2 * shape.batch * heads * (between + among + tokens * size * options.kernel)
        flops = self.projected(config, shape) + inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config) + heads * options.kernel)


class LowRankAttention(WholeSequence):
    """Replaces the keys and values of each sequence by their closest matrices of a given rank.

    Attention is then computed in `rank` dimensions for keys and as many for values. The low-rank subspace depends on
    all tokens, so there is no causal form. At the full rank it is softmax attention.
    """

    name = "low_rank"
    splits_heads = True
    summary = "softmax attention over low-rank approximations of keys and values"
    paper = Paper(
        title="The approximation of one matrix by another of lower rank", authors="Eckart and Young", year=1936
    )
    equation = (
        r"o = \mathrm{softmax}\left(\frac{Q K_r^\top}{\sqrt{d}}\right) V_r,\quad"
        r" K_r = \sum_{i \le r} \sigma_i u_i w_i^\top \approx K"
    )
    capabilities = WHOLE_SEQUENCE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` is that of keys and of values, at most the head size; half of the head size by default."""

        rank: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.rank is not None and self.rank > self.head_layout.key_size:
                raise InvalidValue.of("rank", self.rank, f"at most the head size {self.head_layout.key_size}")

    def attention(self, config: MechanismConfig) -> Any:
        """The attention over truncated singular value decompositions."""
        from attn_variants.mechanisms.low_rank_layers import LowRank

        return LowRank(rank_of(config))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, of the Gram matrices, of projecting to the low-rank subspaces, and of the pairs."""
        (heads, size), rank = self.inner_size(config), rank_of(config)
        per_token = 2 * size**2 + 4 * size * rank + 2 * shape.query * rank
        flops = self.projected(config, shape) + 2 * shape.batch * heads * shape.query * per_token
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


def rank_of(config: MechanismConfig) -> int:
    """The rank of keys and values."""
    own = LowRankAttention.Config.of(config).rank
    return own or max(1, config.head_layout.key_size // 2)
