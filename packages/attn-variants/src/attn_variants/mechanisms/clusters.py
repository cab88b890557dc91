"""Attention within hash buckets, clusters and sorted blocks: LSH, routing, clustered and Sinkhorn attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape, Step
from attn_core.checks import checked, require_choice, require_number, require_whole
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.whole_sequence import WHOLE_SEQUENCE, WholeSequence

WORDS = {"within": ("bucket", "chunks"), "duplicates": ("corrected", "counted"), "ring": ("round", "rounds")}


class HashedAttention(WholeSequence):
    """Tokens attend within their hash bucket; keys are the queries, normalised to unit length.

    A later token that is sorted in shifts the chunks of all tokens after it, so that even with a causal mask outputs
    would depend on later inputs; `lsh_causal` is the causal form.
    """

    name = "lsh"
    splits_heads = True
    summary = "tokens in the same hash bucket attend to each other, over several rounds of hashing"
    paper = Paper(title="Reformer: The Efficient Transformer", authors="Kitaev et al.", year=2020, arxiv="2001.04451")
    equation = (
        r"o_i = \sum_{j \in P_i} \exp\left(\frac{q_i^\top q_j}{\|q_j\| \sqrt{d}} - z_i\right) v_j,\quad"
        r" P_i = \bigcup_r \{j : h_r(q_j) = h_r(q_i)\},\quad h(x) = \arg\max [x R; -x R]"
    )
    sketch: ClassVar = {"buckets": 4, "chunk": 3, "rounds": 1}
    capabilities = WHOLE_SEQUENCE
    projections = 3

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`buckets` is the number of hash buckets, even; `chunk`, the tokens of a chunk; `rounds`, those of hashing;
        `seed`, that of the rotations. `within` its chunk and the one before, a token attends to its own "bucket" or to
        all of both "chunks". `duplicates`, pairs that share a bucket in several rounds, are "corrected" to count once
        or "counted" each time. The first chunk of a round follows the last one of a `ring`: of the same "round", or of
        the round before as in the authors' code, where all "rounds" form one ring."""

        buckets: int = checked(32, require_whole, ge=1, unit="buckets")
        chunk: int = checked(64, require_whole, ge=1, unit="chunk")
        rounds: int = checked(4, require_whole, ge=1, unit="rounds")
        seed: int = 0
        within: str = "bucket"
        duplicates: str = "corrected"
        ring: str = "round"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.buckets % 2:
                raise InvalidValue.of(
                    "buckets", self.buckets, "an even number, as each direction of the rotation gives two buckets"
                )
            for name, words in WORDS.items():
                require_choice(name, getattr(self, name), words)
            if self.ring == "rounds" and (self.within != "chunks" or self.duplicates != "counted"):
                allowed = "'round'; 'rounds' only with within 'chunks' and duplicates 'counted'"
                raise InvalidValue.of("ring", self.ring, allowed)

    def sequential_operations(self, length: int) -> int:
        """The steps of the sort by buckets."""
        return max(1, math.ceil(math.log2(length)))

    def attention(self, config: MechanismConfig) -> Any:
        """The hash buckets, with rotations drawn from the seed."""
        from attn_variants.mechanisms.clusters_layers import HashBuckets, JoinedBuckets

        options = self.Config.of(config)
        return (JoinedBuckets if options.ring == "rounds" else HashBuckets)(
            size=config.head_layout.key_size,
            buckets=options.buckets,
            chunk=options.chunk,
            rounds=options.rounds,
            seed=options.seed,
            within=options.within,
            duplicates=options.duplicates,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections and, per round, of hashing and of two chunks per token, the last chunk padded."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        length = -(-shape.query // options.chunk) * options.chunk
        hashing = shape.query * size * options.buckets // 2
        inner = 2 * shape.batch * heads * options.rounds * (hashing + length * 2 * options.chunk * 2 * size)
        flops = self.projected(config, shape) + inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


class RoutingAttention(WholeSequence):
    """Tokens near a centroid attend to each other; centroids are learned by online k-means in training.

    A cluster takes the nearest of all tokens, so that a later token may displace an earlier one; `routing_causal` is
    the causal form. With one cluster as wide as the sequence it is softmax attention.
    """

    name = "routing"
    summary = "the queries and keys nearest to a learned centroid attend to each other"
    paper = Paper(
        title="Efficient Content-Based Sparse Attention with Routing Transformers",
        authors="Roy et al.",
        year=2021,
        arxiv="2003.05997",
    )
    equation = (
        r"o_i = \frac{1}{|C_i|} \sum_{c \in C_i} \sum_{j \in T_c}"
        r" \mathrm{softmax}_j\left(\frac{q_i^\top k_j}{\sqrt{d}}\right) v_j,\quad T_c = \mathrm{top}_w(\mu_c^\top k)"
    )
    sketch: ClassVar = {"clusters": 3, "window": 4}
    capabilities = WHOLE_SEQUENCE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clusters` is the number of centroids; `window`, the number of tokens of each cluster; `decay`, that of the
        moving average of the centroids in training; `seed`, that of their initial values."""

        clusters: int = checked(8, require_whole, ge=1, unit="clusters")
        window: int = checked(64, require_whole, ge=1, unit="tokens")
        decay: float = checked(0.999, require_number, ge=0, le=1)
        seed: int = 0

    def attention(self, config: MechanismConfig) -> Any:
        """The clusters, with centroids drawn from the seed."""
        from attn_variants.mechanisms.clusters_layers import Routing

        heads, options = config.head_layout, self.Config.of(config)
        return Routing(
            heads=heads.query,
            size=heads.key_size,
            clusters=options.clusters,
            window=options.window,
            decay=options.decay,
            seed=options.seed,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections, of comparing queries and keys with centroids, and of all pairs in a cluster."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        window = min(options.window, shape.query)
        per_cluster = 2 * shape.query * size + 2 * window**2 * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * options.clusters * per_cluster
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


class ClusteredAttention(WholeSequence):
    """Groups of similar queries attend once, by their mean; each query then reweights the group's top keys itself.

    Queries are grouped over the whole sequence, so there is no causal form. With as many groups as queries it is
    softmax attention.
    """

    name = "clustered"
    splits_heads = True
    summary = "similar queries share the weights of their cluster, except on its top keys, where each has its own"
    paper = Paper(
        title="Fast Transformers with Clustered Attention", authors="Vyas et al.", year=2020, arxiv="2007.04825"
    )
    equation = (
        r"A^c_j = \mathrm{softmax}_j\left(\frac{\bar q_c^\top k_j}{\sqrt{d}}\right),\quad"
        r" o_i = \sum_{j \notin T_c} A^c_j v_j + m_c \sum_{j \in T_c}"
        r" \mathrm{softmax}_{j \in T_c}\left(\frac{q_i^\top k_j}{\sqrt{d}}\right) v_j,"
        r"\quad m_c = \sum_{j \in T_c} A^c_j"
    )
    sketch: ClassVar = {"clusters": 3, "top": 2}
    capabilities = WHOLE_SEQUENCE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clusters` C is the number of groups, found by `iterations` of Lloyd's algorithm on codes of `bits` signs of
        random projections drawn from `seed`; `top` is the number of keys T that each query reweights, 0 for none."""

        clusters: int = checked(64, require_whole, ge=1, unit="clusters")
        bits: int = checked(63, require_whole, ge=1, unit="bits")
        iterations: int = checked(10, require_whole, ge=1, unit="iterations")
        top: int = 32
        seed: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.top != 0:
                require_whole("top", self.top, ge=1, unit="keys")

    def attention(self, config: MechanismConfig) -> Any:
        """The module that groups queries and reweights their top keys."""
        from attn_variants.mechanisms.clusters_layers import Clustered

        heads, options = config.head_layout, self.Config.of(config)
        return Clustered(
            size=heads.key_size,
            clusters=options.clusters,
            bits=options.bits,
            iterations=options.iterations,
            top=options.top,
            seed=options.seed,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, hash codes and grouping, of groups attending to keys, and of queries to top keys."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        groups, tokens, top = options.clusters, shape.query, min(options.top, shape.query)
        search = tokens * size * options.bits + (options.iterations + 1) * tokens * groups * options.bits
        attend = 2 * groups * tokens * size + groups * top * size + 2 * tokens * top * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * (search + attend)
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


class SinkhornAttention(WholeSequence):
    """A token attends to its own block and to a softly sorted block, a mixture of all blocks.

    In the paper a network with one output per block learns the sorting; here it is computed from mean queries and keys,
    which needs no fixed number of blocks. It depends on all blocks; `sinkhorn_causal` is the causal form. With one
    block it is softmax attention.
    """

    name = "sinkhorn"
    counts_from_start = True  # blocks are counted from the first row
    splits_heads = True
    summary = "each block attends to itself and to a mixture of blocks given by a learned soft sorting"
    paper = Paper(title="Sparse Sinkhorn Attention", authors="Tay et al.", year=2020, arxiv="2002.11296")
    equation = (
        r"R = \mathrm{Sinkhorn}\left(\exp\frac{\bar Q \bar K^\top}{\tau \sqrt{d}}\right),\quad"
        r" o_b = \mathrm{softmax}\left(\frac{Q_b [K_b; (RK)_b]^\top}{\sqrt{d}}\right) [V_b; (RV)_b]"
    )
    sketch: ClassVar = {"block": 3}
    capabilities = WHOLE_SEQUENCE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` is the number of tokens of a block; `iterations`, those of the Sinkhorn normalisation; `temperature`,
        the τ of the sorting."""

        block: int = checked(64, require_whole, ge=1, unit="tokens")
        iterations: int = checked(8, require_whole, ge=1, unit="steps")
        temperature: float = checked(0.75, require_number, gt=0)

    def attention(self, config: MechanismConfig) -> Any:
        """The module that sorts blocks and attends to them."""
        from attn_variants.mechanisms.clusters_layers import SortedBlocks

        options = self.Config.of(config)
        return SortedBlocks(block=options.block, iterations=options.iterations, temperature=options.temperature)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, block pairs and mixtures, and of two blocks per token, the last block padded."""
        (heads, size), block = self.inner_size(config), self.Config.of(config).block
        blocks = -(-shape.query // block)
        inner = blocks**2 * size * (1 + 2 * block) + blocks * 4 * block**2 * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))
