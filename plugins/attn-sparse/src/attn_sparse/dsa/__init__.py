"""DeepSeek sparse attention (DSA): a light indexer scores all past tokens, and a query attends to the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

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
    Window,
    hookimpl,
)

from attn_sparse.dsa.options import DsaConfig

if TYPE_CHECKING:
    from attn_sparse.dsa.selection import SelectedTokens


class Dsa(DeclaredMechanism):
    """An indexer with a few small heads scores every past token; all heads of a query attend to its best tokens."""

    name = "dsa"
    splits_heads = True
    summary = "a lightweight indexer scores all past tokens, and each query attends to the top k"
    paper = Paper(
        title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
        authors="DeepSeek-AI",
        year=2025,
        arxiv="2512.02556",
    )
    equation = (
        r"O_i = \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_i = \mathrm{top}_{k,\, s \le i}\; I_{is},\quad"
        r" I_{is} = \sum_j w^I_{ij}\, \mathrm{ReLU}\left(q^I_{ij} \cdot k^I_s\right)"
    )
    sketch: ClassVar = {"index_heads": 2, "index_size": 8, "top": 4}
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.BIDIRECTIONAL, Capability.SHARES_KV}
    Config: ClassVar[type[DsaConfig]] = DsaConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal attention that is restricted to the selected tokens."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> SelectedTokens:
        """The indexer with random weights, and the attention to the tokens that it selects."""
        from attn_sparse.dsa.selection import SelectedTokens

        return SelectedTokens(self.spec(config), self.Config.of(config))

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """Causal attention up to `top` tokens, which are all selected; beyond, the module's own attention."""
        if tokens <= self.Config.of(config).top:
            return super().computations(config, tokens)
        return (Computation(part="indexer and attention"),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """One index key per token, shared by the heads of the indexer."""
        return {"index": Field((self.Config.of(config).index_size,))}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Up to `top` keys, the cost of causal attention and index keys; beyond, that of the indexer and attention.

        A single query gathers its `top` keys; several queries are multiplied with all keys, of which they use at most
        `top`.
        """
        own = self.Config.of(config)
        index_keys = 2 * shape.batch * shape.query * config.hidden_size * own.index_size
        learned = config.hidden_size * (own.index_queries + own.index_size) + 2 * own.index_size
        keys = Cost(flops=index_keys, allowed_flops=index_keys, parameters=learned)
        if shape.key <= own.top:
            return super().cost(config, shape) + keys
        per_pair = self.spec(config).pair_flops()
        computed = shape.query * (min(own.most, shape.key) if shape.query == 1 else shape.key)
        # A query that attends to its best k tokens has as many pairs as one that attends to its last k.
        attended = (Causal() & Window(left=own.most - 1)).count(shape.query, shape.key)
        index = self._index_cost(config, shape)
        pairs = Cost(
            flops=shape.batch * computed * per_pair,
            allowed_flops=shape.batch * min(computed, attended) * per_pair,
            parameters=0,
        )
        return self.projection_cost(config, shape) + keys + index + pairs

    def _index_cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of index queries and weights, and of scoring all keys."""
        own = self.Config.of(config)
        queries = 2 * shape.batch * shape.query * config.hidden_size * own.index_queries
        per_pair = 2 * shape.batch * own.index_heads * (own.index_size + 1)
        index, before = shape.key // own.every, shape.key - shape.query
        seen = complete(shape.key, own.every) - complete(before, own.every)
        scored = per_pair * own.scores(shape.key)
        return Cost(flops=queries + shape.query * index * scored, allowed_flops=queries + seen * scored, parameters=0)


def complete(tokens: int, pool: int) -> int:
    """The number of pairs of the first `tokens` queries and pools of `pool` tokens that are complete by then."""
    pools, rest = divmod(tokens, pool)
    return pool * pools * (pools - 1) // 2 + pools * (rest + 1)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Dsa()]
