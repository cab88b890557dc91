"""QSA: an indexer scores blocks of tokens by the means of their index keys, and the output of each head is gated."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionSpec, Cost, Mechanism, MechanismConfig, Paper, Shape, Step, hookimpl
from attn_core.norms import QkNorm

from attn_sparse.dsa import Dsa
from attn_sparse.qsa.options import QsaConfig

if TYPE_CHECKING:
    from attn_sparse.qsa.selection import SelectedMeans


class Qsa(Dsa):
    """Softmax attention to the tokens of a few blocks, the same for all heads, with a sigmoid gate for every output.

    A block is scored by the mean of its tokens' index keys, normalised and turned to the block's first position.
    """

    name = "qsa"
    counts_from_start = True  # blocks are counted from the first row
    summary = "gated attention to the blocks with the best mean index keys, and to the block that is not complete"
    used_by = ("Qwen4-Exp",)
    paper = Paper(title="Qwen4-Exp", authors="Qwen Team", year=2026)
    equation = (
        r"O_i = \sigma(W_G x_i) \odot \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_i = \{s \le i : \lfloor s/B \rfloor \in T_i\} \cup"
        r" \{s \le i : \lfloor s/B \rfloor = \lfloor (i+1)/B \rfloor\},\quad"
        r" T_i = \mathrm{top}_{k/B,\, (b+1) B \le i+1} \sum_j"
        r" \mathrm{ReLU}\left(q^I_{ij} \cdot \mathrm{norm}(\mathrm{mean}(k^I_{[bB, (b+1)B)}))\right)"
    )
    sketch: ClassVar = {"index_heads": 2, "index_size": 8, "top": 4, "block": 2}
    Config = QsaConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal attention that is restricted to the selected tokens, with norms of queries and keys."""
        return dataclasses.replace(super().spec(config), norm=QkNorm(eps=self.Config.of(config).norm_eps))

    def inner(self, config: MechanismConfig) -> SelectedMeans:
        """The indexer and the gate with random weights, and the attention to the tokens that are selected."""
        from attn_sparse.qsa.selection import SelectedMeans

        return SelectedMeans(self.spec(config), self.Config.of(config))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """That of `dsa`, whose indexer scores blocks, and of the gates."""
        gates = config.num_heads * config.head_layout.value_size
        flops = 2 * shape.batch * shape.query * config.hidden_size * gates
        weights = (config.hidden_size + config.bias) * gates
        return super().cost(config, shape) + Cost(flops=flops, allowed_flops=flops, parameters=weights)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Qsa()]
