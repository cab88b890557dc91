"""Locality-sensitive hashing attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence

WORDS = {"within": ("bucket", "chunks"), "duplicates": ("corrected", "counted"), "ring": ("round", "rounds")}


class HashedAttention(WholeSequence):
    """Queries meet keys of their own hash bucket; keys are the queries, of length one.

    Where a later token is sorted in, all behind it move to other chunks, so that even with a causal mask outputs would
    depend on later inputs: no causal form is offered.
    """

    name = "lsh"
    summary = "tokens of one hash bucket attend to each other, in several rounds"
    paper = Paper(title="Reformer: The Efficient Transformer", authors="Kitaev et al.", year=2020, arxiv="2001.04451")
    equation = (
        r"o_i = \sum_{j \in P_i} \exp\left(\frac{q_i^\top q_j}{\|q_j\| \sqrt{d}} - z_i\right) v_j,\quad"
        r" P_i = \bigcup_r \{j : h_r(q_j) = h_r(q_i)\},\quad h(x) = \arg\max [x R; -x R]"
    )
    sketch: ClassVar = {"buckets": 4, "chunk": 3, "rounds": 1}
    capabilities = ENCODER
    projections = 3

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`buckets`, even; tokens of a `chunk`; `rounds` of hashing; the `seed` of the rotations; whom a token sees of
        its chunk and the one before: `within` its "bucket" or all of these "chunks"; pairs that meet in several rounds
        are `duplicates`, "corrected" to count once or "counted" each time. The first chunk of a `ring` follows the last
        of its "round", or of the round before as in the authors' code, which makes one ring of all "rounds"."""

        buckets: int = 32
        chunk: int = 64
        rounds: int = 4
        seed: int = 0
        within: str = "bucket"
        duplicates: str = "corrected"
        ring: str = "round"

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("buckets", "chunk", "rounds"):
                check_whole(name, getattr(self, name), name)
            if self.buckets % 2:
                raise InvalidValue.of("buckets", self.buckets, "an even number: a rotation makes two of each direction")
            for name, words in WORDS.items():
                if getattr(self, name) not in words:
                    raise InvalidValue.of(name, getattr(self, name), " or ".join(words))
            if self.ring == "rounds" and (self.within != "chunks" or self.duplicates != "counted"):
                allowed = "'round', or within 'chunks' with duplicates 'counted': chunks of two rounds share no buckets"
                raise InvalidValue.of("ring", self.ring, allowed)

    def attention(self, config: MechanismConfig) -> Any:
        """Buckets of rotations drawn from the seed."""
        from attn_variants.mechanisms.clusters.lsh_layer import HashBuckets, JoinedBuckets

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

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Rotations of every token, and in each round two chunks for every token, the last chunk filled up."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        length = -(-shape.query // options.chunk) * options.chunk
        hashing = shape.query * size * options.buckets // 2
        inner = 2 * shape.batch * heads * options.rounds * (hashing + length * 2 * options.chunk * 2 * size)
        flops = self.projected(config, shape) + inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))
