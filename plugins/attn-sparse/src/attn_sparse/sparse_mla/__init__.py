"""DeepSeek sparse attention over latents, as DeepSeek-V3.2, GLM-5 and GLM-5.3 have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attn_core import (
    Capability,
    Causal,
    Computation,
    ComputedMechanism,
    Cost,
    Field,
    Mechanism,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    StateSpecs,
    Step,
    Window,
    hookimpl,
)

from attn_sparse.dsa import complete
from attn_sparse.sparse_mla.options import SparseMlaConfig

if TYPE_CHECKING:
    from attn_sparse.sparse_mla.layer import SparseLatentLayer


class SparseMla(ComputedMechanism):
    """Multi-head latent attention in which an indexer, whose queries read the queries' latent, selects the tokens."""

    name = "sparse_mla"
    splits_heads = True
    summary = "latent attention to the top k tokens of a lightweight indexer, which reads the query latent"
    used_by = ("DeepSeek-V3.2",)
    paper = Paper(
        title="DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models",
        authors="DeepSeek-AI",
        year=2025,
        arxiv="2512.02556",
    )
    equation = (
        r"o_i = \sum_{s \in S_i} \mathrm{softmax}_s\left(\frac{q_i^\top [W^{UK} c_s; k^R_s]}{\sqrt{d_n + d_R}}\right)"
        r" W^{UV} c_s,\quad S_i = \mathrm{top}_{k,\, s \le i} \sum_j w^I_{ij}\,"
        r" \mathrm{ReLU}\left((W^I_j c^Q_i) \cdot k^I_s\right)"
    )
    sketch: ClassVar = {"index_heads": 2, "index_size": 8, "top": 4, "latent": 8, "query_latent": 8, "rotary_size": 4}
    capabilities = frozenset(
        {Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.WEIGHTS, Capability.NORMALISED}
        | {Capability.PADDING, Capability.ROTARY, Capability.HEAD_DIM, Capability.CHOOSES, Capability.BIAS}
    )
    Config = SparseMlaConfig

    def build(self, config: MechanismConfig) -> SparseLatentLayer:
        """A new `SparseLatentLayer`."""
        from attn_sparse.sparse_mla.layer import SparseLatentLayer

        return SparseLatentLayer(self.Config.of(config))

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """Causal attention over expanded keys and values, if all tokens are selected; beyond, the layer's own."""
        own = self.Config.of(config)
        return super().computations(config, tokens) if own.scores(tokens) else (Computation(asked=own.scaled),)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The normalised latent, the rotary key and the index key of each token; with a pool, the index keys of
        complete pools, and those of the tokens of the last one with what they are mixed by."""
        own = self.Config.of(config)
        token, index = {"latent": Field((own.latent,))}, {"index": Field((own.index_size,))}
        if own.rotary_size:
            token["rotary_key"] = Field((own.rotary_size,))
        if own.pool is None:
            return {"latent": Paged(token | index)}
        open_pool = Paged(index | {"gate": Field((own.index_size,))}, window=own.pool)
        return {"latent": Paged(token), "open": open_pool, "pools": Paged(index, every=own.pool)}

    def depends_on_padding(self, config: MechanismConfig) -> bool:
        """Whether there are pools, which are counted from the first row."""
        return self.Config.of(config).pool is not None

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, of the index scores of all tokens, if not all are selected, and of attention.

        Whole sequences are computed over expanded keys and values, steps over latents. A single query gathers its `top`
        tokens; several queries are multiplied with all tokens, of which they use at most `top`.
        """
        own = self.Config.of(config)
        heads, width, up = own.num_heads, own.hidden_size, own.latent * own.num_heads * (own.nope + own.value)
        attention = (width + heads * own.key) * own.query_latent + up + width * heads * own.value
        attention += width * (own.latent + own.rotary_size)
        index_keys = 1 if own.pool is None else 2
        asked = own.index_heads * (own.query_latent * own.index_size + width)
        remembered = index_keys * width * own.index_size
        biases = own.bias * (own.query_latent + own.latent + own.rotary_size + width)
        biases += own.index_size * (own.pool or 0)
        index, before = shape.key // own.every, shape.key - shape.query
        seen = shape.batch * (complete(shape.key, own.every) - complete(before, own.every))
        scored = 2 * own.index_heads * (own.index_size + 1) * own.scores(shape.key)
        spec = own.expanded if shape.whole else own.absorbed
        pair = 2 * heads * (spec.heads.key_size + spec.heads.value_size)
        met = shape.query * (min(own.most, shape.key) if shape.query == 1 else shape.key)
        attended = shape.batch * (Causal() & Window(left=own.most - 1)).count(shape.query, shape.key)
        projected = attention + remembered + asked * own.scores(shape.key)
        tokens = 2 * shape.batch * shape.query * projected
        return Cost(
            flops=tokens + shape.batch * (shape.query * index * scored + met * pair),
            allowed_flops=tokens + seen * scored + attended * pair,
            parameters=attention + asked + remembered + own.query_latent + own.latent + 2 * own.index_size + biases,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [SparseMla()]
