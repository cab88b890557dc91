"""Attention with structural positions from the dependency tree of a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, Cost, DeclaredMechanism, MechanismConfig, Paper, Shape, Step
from attn_core.checks import checked, require_whole
from attn_core.errors import InvalidValue
from attn_core.modifiers import DependencyKeys, DependencyTree, DependencyValues

from attn_variants.mechanisms.common import GROUPED_SELF, self_mask

STRUCTURAL_POSITIONS = Paper(
    title="Self-Attention with Structural Position Representations",
    authors="Wang et al.",
    year=2019,
    arxiv="1909.00383",
)


class DependencyAttention(DeclaredMechanism):
    """Adds a learned vector per distance in a dependency parse to the keys, and another to the values.

    A call may give the tree of each sentence, `layer(rows, parses=...)`; else all have that of the options, which
    counts positions from the start of a sequence. Each token after it depends on the one before.
    """

    name = "dependency"
    drops_weights = splits_heads = output_bias_apart = True
    summary = "learned vectors for distances in the dependency tree are added to keys and values"
    paper = STRUCTURAL_POSITIONS
    equation = (
        r"e_{ij} = \frac{q_i^\top (k_j + a^K_{c(r_{ij})})}{\sqrt{d_k}},\quad"
        r" o_i = \sum_j \alpha_{ij} (v_j + a^V_{c(r_{ij})}),\quad"
        r" r_{ij} = \begin{cases} \delta_i - \delta_j & i \text{ above or below } j \\"
        r" \mathrm{sgn}(j - i)\,(\delta_i + \delta_j) & \text{else} \end{cases},\quad"
        r" c(x) = \max(-k, \min(k, x))"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`parse` lists, for each token, the token that it depends on, -1 for the root; an empty parse is a chain.
        `clip` k is the largest distance, to which larger ones are clipped; with `share`, heads share the vectors."""

        parse: tuple[int, ...] = ()
        clip: int = checked(16, require_whole, ge=0, unit="positions")
        share: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "parse", parse_of(self.parse))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        tree, heads = DependencyTree(options.parse), config.head_layout
        tables = (
            DependencyKeys(clip=options.clip, share=options.share, tree=tree),
            DependencyValues(clip=options.clip, share=options.share, tree=tree),
        )
        return AttentionSpec(heads=heads, modifiers=tables, mask=self_mask(config), rotary=config.rotary)

    def build(self, config: MechanismConfig) -> Any:
        """A new `DependencyLayer` with randomly initialised weights."""
        from attn_variants.mechanisms.dependency_layer import DependencyLayer

        return DependencyLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            dropout=config.dropout,
        )


def parse_of(given: Any) -> tuple[int, ...]:
    """The head of each token of a parse, from a list of whole numbers, which may be floats, as from JSON.

    Raises `InvalidValue` for anything else, and for heads that do not form a tree.
    """
    listed = isinstance(given, (list, tuple)) and all(
        isinstance(head, (int, float)) and not isinstance(head, bool) and float(head).is_integer() for head in given
    )
    if not listed:
        raise InvalidValue.of("parse", given, "a list with the head of each token, -1 for the root")
    heads = tuple(int(head) for head in given)
    try:
        DependencyTree(heads)
    except InvalidValue as error:
        raise InvalidValue(f"parse: {error}", field="parse") from error
    return heads


class DependencyDepthAttention(DeclaredMechanism):
    """Adds the position and the depth in a dependency parse to the inputs, as sinusoids fused by a learned map.

    A call may give the tree of each sentence, `layer(rows, parses=...)`; else all have that of the options, which
    counts positions from the start of a sequence. Each token after it depends on the one before.
    """

    name = "dependency_depth"
    counts_from_start = True  # positions are added to the inputs
    summary = "sinusoids of position and of depth in the dependency tree are fused and added to the inputs"
    paper = STRUCTURAL_POSITIONS
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V \text{ of }"
        r" x_i + \tanh(U\, \mathrm{PE}(i) + W\, \mathrm{PE}(\delta_i)),\quad"
        r" \delta_i = \text{steps from } i \text{ to the root}"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`parse` lists, for each token, the token that it depends on, -1 for the root; an empty parse is a chain."""

        parse: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "parse", parse_of(self.parse))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary)

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `DepthLayer` with randomly initialised weights."""
        from attn_variants.attention.layer import SpecLayer
        from attn_variants.mechanisms.sinusoidal_layers import DepthLayer

        attention = SpecLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            dropout=config.dropout,
        )
        return DepthLayer(attention, DependencyTree(self.Config.of(config).parse), hidden_size=config.hidden_size)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The declared cost, and two products with [hidden_size, hidden_size] matrices for every distinct position.

        Whole sequences share their positions; in a step every request has its own.
        """
        fused = 2 * config.hidden_size**2
        flops = 2 * shape.query * fused * (shape.batch if isinstance(shape, Step) else 1)
        places = Cost(flops=flops, allowed_flops=flops, parameters=fused)
        return super().cost(config, shape) + places
