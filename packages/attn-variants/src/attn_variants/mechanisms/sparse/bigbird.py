"""BigBird."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.masks import BigBird

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import ENCODER, check_least, never_causal


class BigBirdAttention(DeclaredMechanism):
    """Blocks of tokens see their neighbours, the first and the last block, and random ones of each head's own.

    At most (5 + 2 random) blocks of tokens are all seen, as in the authors' code; the last block may be shorter than
    the others. The random blocks depend on the head, the length and `seed`. Where none is given it is the number of the
    layer, so that the layers of an encoder see different ones, as in the authors' code.
    """

    name = "bigbird"
    summary = "a window of blocks, global first and last blocks, and random blocks"
    paper = Paper(
        title="Big Bird: Transformers for Longer Sequences", authors="Zaheer et al.", year=2020, arxiv="2007.14062"
    )
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i},\quad"
        r" A_i = \{j : |\beta_i - \beta_j| \le 1 \text{ or } \beta_i \in \{0, m\} \text{ or } \beta_j \in \{0, m\}"
        r" \text{ or } \beta_j \in R_h(\beta_i)\},\quad \beta_i = \lfloor i/b \rfloor"
    )
    sketch: ClassVar = {"block": 1, "random": 1}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` tokens a block, `random` random blocks per block of queries and head, drawn by `seed`, by
        default the number of the layer."""

        block: int = 64
        random: int = 3
        seed: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("block", self.block, "tokens")
            check_least("random", self.random, 0)
            if self.seed is not None:
                check_least("seed", self.seed, 0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should be causal, `InvalidValue` where heads do not divide."""
        never_causal(self.name, config)
        options = self.Config.of(config)
        seed = config.layer if options.seed is None else options.seed
        mask = BigBird(block=options.block, random=options.random, seed=seed, number_of_heads=config.heads)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
