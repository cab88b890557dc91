"""Graph attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import Capability, ComputedMechanism, Cost, MechanismConfig, Paper, Shape, Step
from attn_core.checks import checked, require_choice, require_number
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.common import BASIC

MERGES = ("concat", "mean")


class GraphAttention(ComputedMechanism):
    """Tokens attend to their neighbours in a graph; an edge is scored by LeakyReLU of a target plus a source term.

    There is no decoding state: the graph counts positions from the start of a sequence, so a step recomputes the whole
    sequence. If causal, edges from later positions are left out.
    """

    name = "gat"
    drops_weights = True
    summary = "tokens attend along the edges of a graph, by an additive score"
    paper = Paper(title="Graph Attention Networks", authors="Veličković et al.", year=2018, arxiv="1710.10903")
    equation = (
        r"e_{ij} = \mathrm{LeakyReLU}(a^\top [W x_i; W x_j]),\quad"
        r" o_i = \sum_{j \in N(i)} \mathrm{softmax}_{j \in N(i)}(e_{ij})\, W x_j"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.BIDIRECTIONAL,
            Capability.EXACT,
            Capability.WEIGHTS,
            Capability.NORMALISED,
            Capability.PADDING,
        }
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`edges` are pairs (from, to) of positions, None for all pairs; with `self_loops` every position is also its
        own neighbour; `merge` joins heads by "concat" or "mean"; `slope` is that of LeakyReLU below zero."""

        edges: tuple[tuple[int, int], ...] | None = None
        self_loops: bool = True
        merge: str = checked("concat", require_choice, MERGES)
        slope: float = checked(0.2, require_number, ge=0, lt=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.edges is not None:
                object.__setattr__(self, "edges", pairs(self.edges))

    def build(self, config: MechanismConfig) -> Any:
        """A new `GraphLayer`; raises `InvalidValue` unless the merged heads have `hidden_size` elements."""
        from attn_variants.mechanisms.gat_layer import GraphLayer, GraphShape

        options, size = self.Config.of(config), size_of(config)
        merged = size if options.merge == "mean" else config.num_heads * size
        if merged != config.hidden_size:
            raise InvalidValue.of(
                "head_dim",
                size,
                f"a size with which heads merged by {options.merge!r} have hidden_size {config.hidden_size} elements",
            )
        shape = GraphShape(
            config=config,
            size=size,
            merge=options.merge,
            edges=options.edges,
            self_loops=options.self_loops,
            slope=options.slope,
        )
        return GraphLayer(shape)

    def depends_on_padding(self, config: MechanismConfig) -> bool:
        """Whether there are `edges`, which are pairs of positions."""
        return self.Config.of(config).edges is not None

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projection and, without `edges`, of the matrix products with the values."""
        into = config.num_heads * size_of(config)
        projected = 2 * shape.batch * shape.query * config.hidden_size * into
        flops = least = projected
        if self.Config.of(config).edges is None:
            seen = shape.query * (2 * shape.key - shape.query + 1) // 2 if config.causal else shape.query * shape.key
            flops += 2 * shape.batch * shape.query * shape.key * into
            least += 2 * shape.batch * seen * into
        parameters = config.hidden_size * into + 2 * into + (config.hidden_size if config.bias else 0)
        return Cost(flops=flops, allowed_flops=least, parameters=parameters)


def size_of(config: MechanismConfig) -> int:
    """The size of one head: `head_dim`, or by default the hidden size if heads are averaged."""
    if config.head_dim is None and GraphAttention.Config.of(config).merge == "mean":
        return config.hidden_size
    return config.head_layout.key_size


def pairs(edges: Any) -> tuple[tuple[int, int], ...]:
    """Edges as a tuple of pairs of whole numbers from 0, at least one; raises `InvalidValue` for anything else."""
    try:
        found = tuple((int(one), int(other)) for one, other in edges)
        whole = all((one, other) == tuple(edge) for (one, other), edge in zip(found, edges, strict=True))
    except (TypeError, ValueError):
        whole, found = False, ()
    if not found or not whole or min(min(edge) for edge in found) < 0:
        raise InvalidValue.of("edges", edges, "at least one pair (from, to) of whole numbers from 0")
    return found
