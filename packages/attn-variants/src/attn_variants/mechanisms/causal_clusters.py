"""Causal forms of LSH, routing and Sinkhorn attention: the last tokens of the same bucket, cluster or blocks before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Capability, Cost, Heads, MechanismConfig, Shape, Step
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.clusters import HashedAttention, RoutingAttention, SinkhornAttention
from attn_variants.mechanisms.common import BASIC
from attn_variants.mechanisms.whole_sequence import WholeSequence


class LastOfKind(WholeSequence):
    """Base class of mechanisms whose tokens see the last tokens of their bucket or cluster; keys are the queries."""

    capabilities = BASIC | frozenset({Capability.CAUSAL, Capability.PADDING})
    projections = 3

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config."""
        return config.head_layout

    def pairs(self, config: MechanismConfig, shape: Shape | Step, window: int) -> int:
        """The FLOPs of one round: chunks of `window` tokens attend to themselves and to the chunk before."""
        heads, size = self.inner_size(config)
        length = -(-shape.query // window) * window
        return 2 * shape.batch * heads * length * 2 * window * 2 * size


class CausalHashedAttention(LastOfKind):
    """A token attends to the last `window` tokens of its hash bucket, and to itself only if there is no other.

    Reformer cuts the sorted tokens into chunks, whose borders move as later tokens are sorted in, so that outputs
    depend slightly on the future even under a causal mask. Here the tokens of a bucket are counted back from the token
    itself, which does not depend on later tokens.
    """

    name = "lsh_causal"
    splits_heads = True
    summary = "each token attends to the most recent tokens of its hash bucket, over several rounds of hashing"
    paper = HashedAttention.paper
    equation = (
        r"o_i = \sum_{j \in P_i} \exp\left(\frac{q_i^\top q_j}{\|q_j\| \sqrt{d}} - z_i\right) v_j,\quad"
        r" P_i = \bigcup_r \mathrm{last}_w \{j \le i : h_r(q_j) = h_r(q_i)\},\quad h(x) = \arg\max [x R; -x R]"
    )
    sketch: ClassVar = {"buckets": 4, "window": 3, "rounds": 1}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`buckets` is the number of hash buckets, even; `window` w, the number of tokens of a bucket that are visible,
        including the token itself; `rounds`, those of hashing (pairs that share a bucket in several rounds count once);
        `seed`, that of the rotations."""

        buckets: int = checked(32, require_whole, ge=1, unit="buckets")
        window: int = checked(64, require_whole, ge=1, unit="window")
        rounds: int = checked(4, require_whole, ge=1, unit="rounds")
        seed: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.buckets % 2:
                raise InvalidValue.of(
                    "buckets", self.buckets, "an even number, as each direction of the rotation gives two buckets"
                )

    def attention(self, config: MechanismConfig) -> Any:
        """The hash buckets, with rotations drawn from the seed."""
        from attn_variants.mechanisms.causal_clusters_layers import CausalHashBuckets

        options = self.Config.of(config)
        return CausalHashBuckets(
            size=config.head_layout.key_size,
            buckets=options.buckets,
            chunk=options.window,
            rounds=options.rounds,
            seed=options.seed,
            within="bucket",
            duplicates="corrected",
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections, of hashing every token, and of the pairs of each round."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        hashing = 2 * shape.batch * heads * shape.query * size * options.buckets // 2
        inner = options.rounds * (hashing + self.pairs(config, shape, options.window))
        flops = self.projected(config, shape) + inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


class CausalRoutingAttention(LastOfKind):
    """A token attends to the last `window` tokens of its own cluster, and to itself only if there is no other.

    In the paper a cluster takes its nearest tokens of the whole sequence, where a later token may displace an earlier
    one. Here each token belongs to its nearest centroid and attends backwards from itself. Keys are the queries, as in
    the paper's causal form.
    """

    name = "routing_causal"
    summary = "each token attends to the most recent tokens assigned to the same learned centroid"
    paper = RoutingAttention.paper
    equation = (
        r"o_i = \sum_{j \in T_i} \mathrm{softmax}_j\left(\frac{q_i^\top q_j}{\|q_j\| \sqrt{d}}\right) v_j,\quad"
        r" T_i = \mathrm{last}_w \{j \le i : c_j = c_i\},\quad c_i = \arg\max_c \mu_c^\top q_i"
    )
    sketch: ClassVar = {"clusters": 3, "window": 4}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clusters` is the number of centroids; `window` w, the number of tokens of a cluster that are visible,
        including the token itself; `decay`, that of the moving average of the centroids in training; `seed`, that of
        their initial values."""

        clusters: int = checked(8, require_whole, ge=1, unit="clusters")
        window: int = checked(64, require_whole, ge=1, unit="tokens")
        decay: float = checked(0.999, require_number, ge=0, le=1)
        seed: int = 0

    def attention(self, config: MechanismConfig) -> Any:
        """The clusters, with centroids drawn from the seed."""
        from attn_variants.mechanisms.causal_clusters_layers import CausalRouting

        heads, options = config.head_layout, self.Config.of(config)
        return CausalRouting(
            heads=heads.query,
            size=heads.key_size,
            clusters=options.clusters,
            window=options.window,
            decay=options.decay,
            seed=options.seed,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections, of comparing tokens with centroids, and of the pairs within clusters."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        nearest = 2 * shape.batch * heads * shape.query * options.clusters * size
        flops = self.projected(config, shape) + nearest + self.pairs(config, shape, options.window)
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


class CausalSinkhornAttention(SinkhornAttention):
    """A token attends to its own block up to itself, and to a soft mixture of the blocks before.

    As in the paper's causal Sinkhorn balancing, a block is matched with earlier blocks only. Here columns are
    normalised over the rows so far, and a row is computed from the mean query of the block before, so that no output
    depends on later tokens. With one block it is causal softmax attention.
    """

    name = "sinkhorn_causal"
    summary = "each block attends to itself and to a learned soft mixture of the earlier blocks"
    equation = (
        r"R = \mathrm{Sinkhorn}_{j < b}\left(\exp\frac{\bar q_{b-1} \bar k_j^\top}{\tau \sqrt{d}}\right),\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q_i [K_{b, \le i}; (RK)_b]^\top}{\sqrt{d}}\right) [V_{b, \le i}; (RV)_b]"
    )
    capabilities = LastOfKind.capabilities

    def attention(self, config: MechanismConfig) -> Any:
        """The module that mixes and attends to earlier blocks."""
        from attn_variants.mechanisms.causal_clusters_layers import CausalSortedBlocks

        options = self.Config.of(config)
        return CausalSortedBlocks(block=options.block, iterations=options.iterations, temperature=options.temperature)
