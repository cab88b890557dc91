"""PaTH attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Computation,
    Cost,
    DeclaredMechanism,
    Field,
    Heads,
    MechanismConfig,
    Paper,
    Shape,
    Step,
)
from attn_core.checks import checked, require_whole

from attn_variants.mechanisms.common import GROUPED_SELF, self_mask

if TYPE_CHECKING:
    from attn_variants.mechanisms.path_layer import PathInner


class PathAttention(DeclaredMechanism):
    """Multiplies queries by one Householder-like matrix per token between key and query, computed from that token.

    The position encoding thus depends on the data, not only on the distance as in a rotary embedding, which makes state
    tracking possible.
    """

    name = "path"
    splits_heads = True
    summary = "a Householder transformation for every token between key and query, accumulated in the score"
    paper = Paper(
        title="PaTH Attention: Position Encoding via Accumulating Householder Transformations",
        authors="Yang et al.",
        year=2025,
        arxiv="2505.16381",
    )
    equation = (
        r"\alpha_{ij} \propto \exp\left(\frac{q_i^\top H_i H_{i-1} \cdots H_{j+1} k_j}{\sqrt{d_k}}\right),\quad"
        r" H_t = I - \beta_t w_t w_t^\top,\quad \lVert w_t \rVert = 1,\quad \beta_t = 2\,\sigma(u^\top x_t + b)"
    )
    capabilities = GROUPED_SELF - {Capability.BIDIRECTIONAL, Capability.ROTARY, Capability.SHARES_KV}
    sequential = True

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` is that of the projection to the directions w; `taps`, the size of the short convolution over them in
        tokens; `block`, the number of tokens that are processed at once, which affects only the speed.

        With `forget_gate` every token t has a gate f_t = σ(v^T x_t + c) per head, and ln f_t of all tokens after the
        key is added to the product of query and key, before the division by √d_k, as in the authors' library.
        """

        rank: int = checked(32, require_whole, ge=1, unit="elements")
        taps: int = checked(3, require_whole, ge=1, unit="tokens")
        block: int = checked(64, require_whole, ge=1, unit="tokens")
        forget_gate: bool = False

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))

    def inner(self, config: MechanismConfig) -> PathInner:
        """The module that transforms queries, with randomly initialised weights."""
        from attn_variants.mechanisms.path_layer import PathInner

        own = self.Config.of(config)
        shared = {"rank": own.rank, "taps": own.taps, "block": own.block}
        return PathInner(self.spec(config), hidden_size=config.hidden_size, forget_gate=own.forget_gate, **shared)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """A computation of its own, as no kernel transforms queries along the way to each key."""
        return (Computation(),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """The direction w and the strength β of a token, and the logarithm of its gate where it has one; the last two
        in float32, as those of hundreds of tokens are multiplied or added."""
        heads = config.head_layout
        gate = {"fade": Field((heads.query,), dtype="float32")} if self.Config.of(config).forget_gate else {}
        return {
            "direction": Field((heads.key_value, heads.key_size)),
            "strength": Field((heads.key_value,), dtype="float32"),
            **gate,
        }

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and directions of new tokens, of products within blocks, and of the pairs.

        Whole sequences transform keys once and queries by one product per block; a step transforms every query by all
        tokens of all blocks.
        """
        own, heads = self.Config.of(config), config.head_layout
        into = heads.key_value * heads.key_size
        gates = heads.key_value + (heads.query if own.forget_gate else 0)
        projected = 2 * shape.query * (config.hidden_size * (own.rank + gates) + own.rank * into)
        parameters = own.rank * (config.hidden_size + into) + into * own.taps + (config.hidden_size + 1) * gates
        pairs, allowed = (whole_flops if shape.whole else step_flops)(heads, shape, own.block)
        turned = Cost(
            flops=shape.batch * (projected + pairs),
            allowed_flops=shape.batch * (projected + allowed),
            parameters=parameters,
        )
        return self.projection_cost(config, shape) + turned


def whole_flops(heads: Heads, shape: Shape | Step, block: int) -> tuple[int, int]:
    """The FLOPs of one whole sequence without projections, and those of a kernel that skips later keys."""
    block = min(block, max(1, shape.key))
    blocks = -(-shape.key // block)
    tokens, size = blocks * block, heads.key_size
    turned_keys = 2 * heads.key_value * tokens * size * (3 * block + size)
    own = 2 * heads.query * tokens * block * (3 * size + block)
    # A block of queries attends to all blocks before it and is transformed by all of them but the first.
    transforms = 2 * heads.query * block * size**2 * ((blocks - 1) * (blocks - 2) // 2)
    scores = blocks * (blocks - 1) // 2 * block**2
    values = blocks * (blocks + 1) // 2 * block**2
    between = 2 * heads.query * (scores * size + values * heads.value_size)
    seen = shape.key * (shape.key + 1) // 2
    least = 2 * heads.query * min(scores, seen) * size + 2 * heads.query * min(values, seen) * heads.value_size
    return turned_keys + own + transforms + between, turned_keys + own + transforms + least


def step_flops(heads: Heads, shape: Shape | Step, block: int) -> tuple[int, int]:
    """Like `whole_flops`, for the new queries of a step over cached tokens."""
    block = min(block, max(1, shape.key))
    tokens, size = -(-shape.key // block) * block, heads.key_size
    among = 4 * heads.key_value * size * block
    passing = 2 * heads.query * (3 * size + block)
    values = 2 * heads.query * heads.value_size
    seen = shape.query * (shape.key - shape.query) + shape.query * (shape.query + 1) // 2
    flops = tokens * (among + shape.query * passing) + shape.query * shape.key * values
    return flops, shape.key * among + seen * (passing + values)
