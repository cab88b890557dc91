"""Attention to a window and to compressed entries of all earlier tokens, as in DeepSeek-V4."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attn_core import (
    Capability,
    Causal,
    ComputedMechanism,
    Cost,
    Field,
    Mechanism,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    StateSpec,
    StateSpecs,
    Step,
    Window,
    hookimpl,
)

from attn_sparse.compressed.options import CompressedConfig

if TYPE_CHECKING:
    from attn_sparse.compressed.layer import CompressedLayer


class Compressed(ComputedMechanism):
    """One row per token within a window and one per block of tokens before it, selected by an indexer or all read."""

    name = "compressed"
    counts_from_start = True  # blocks are counted from the first row
    summary = "attention to a window and to one compressed row per block of tokens, keys and values at once"
    used_by = ("DeepSeek-V4",)
    paper = Paper(title="DeepSeek-V4", authors="DeepSeek-AI", year=2026)
    equation = (
        r"o_i = R_{-i} \sum_{e \in W_i \cup S_i} \frac{\exp(q_i^\top e / \sqrt d)}"
        r"{\exp(b) + \sum_{e'} \exp(q_i^\top e' / \sqrt d)}\, e,\quad"
        r" e_w = R_{mw} \mathrm{RMSNorm}\left(\sum_{j \in w} \mathrm{softmax}_j(z_j + B_j) \odot u_j\right),\quad"
        r" S_i = \mathrm{top}_{k,\, mw + m \le i + 1} \sum_h w^I_{ih}\, \mathrm{ReLU}(q^I_{ih} \cdot e^I_w)"
    )
    sketch: ClassVar = {"window": 2, "every": 2, "top": 2, "index_heads": 2, "index_size": 8, "query_latent": 8} | {
        "output_groups": 2,
        "output_latent": 8,
    }
    capabilities = frozenset(
        {Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING, Capability.ROTARY}
        | {Capability.HEAD_DIM, Capability.CHOOSES}
    )
    Config = CompressedConfig

    def build(self, config: MechanismConfig) -> CompressedLayer:
        """A new `CompressedLayer`."""
        from attn_sparse.compressed.layer import CompressedLayer

        return CompressedLayer(self.Config.of(config))

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The rows of the window, those of complete blocks, and what the next entry is mixed from."""
        own = self.Config.of(config)
        states: dict[str, StateSpec] = {"window": Paged({"entry": Field((own.size,))}, window=own.window)}
        if own.every is not None:
            open_block = {name: Field((own.parts * own.size,)) for name in ("value", "gate")}
            rows = {"entry": Field((own.size,))}
            if own.indexed:
                open_block |= {f"index_{name}": Field((own.parts * own.index_size,)) for name in ("value", "gate")}
                rows["index"] = Field((own.index_size,))
            states["open"] = Paged(open_block, window=own.parts * own.every)
            states["compressed"] = Paged(rows, every=own.every)
        return states

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, of index scores of all entries, and of attention.

        Whole sequences are computed for `window` queries at a time, with all rows that one of them sees; single queries
        with the `top` entries, several queries of a step with all of them.
        """
        own = self.Config.of(config)
        width, grouped = own.hidden_size, own.output_groups * own.output_latent
        attention = (width + own.heads_width) * own.query_latent + width * own.size
        attention += own.heads_width * own.output_latent + grouped * width
        entry = 0 if own.every is None else 2 * width * own.parts * own.size
        indexer = own.index_heads * (own.query_latent * own.index_size + width) + 2 * width * own.parts * own.index_size
        indexer = indexer if own.indexed else 0
        biases = own.query_latent + own.size + own.num_heads
        if own.every is not None:
            biases += own.every * own.parts * own.size + own.size
            biases += (own.every * own.parts * own.index_size + own.index_size) * own.indexed
        tokens = 2 * shape.batch * shape.query * (attention + entry + indexer)
        pair, scored = 4 * own.num_heads * own.size, 2 * own.index_heads * (own.index_size + 1) * own.indexed
        near = (Causal() & Window(left=own.window - 1)).count(shape.query, shape.key)
        before = shape.key - shape.query
        far = own.entries_seen(shape.key, own.top) - own.entries_seen(before, own.top)
        seen = own.entries_seen(shape.key) - own.entries_seen(before)
        met, met_scores = self._met(own, shape)
        return Cost(
            flops=tokens + shape.batch * (met * pair + met_scores * scored),
            allowed_flops=tokens + shape.batch * ((near + far) * pair + seen * scored),
            parameters=attention + entry + indexer + biases,
        )

    def _met(self, own: CompressedConfig, shape: Shape | Step) -> tuple[int, int]:
        """The pairs of a sequence that are computed: of queries and rows, and of queries and index keys."""
        starts = range(0, shape.key, own.window) if shape.whole else [shape.key - shape.query]
        stops = [*starts[1:], shape.key]
        met = scores = 0
        for start, stop in zip(starts, stops, strict=True):
            queries, entries = stop - start, own.entries(stop)
            read = min(entries, own.top) if queries == 1 and own.top is not None else entries
            met += queries * (stop - max(0, start - own.window + 1) + read)
            scores += queries * entries
        return met, scores


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Compressed()]
