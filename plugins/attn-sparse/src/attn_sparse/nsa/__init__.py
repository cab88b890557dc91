"""Native sparse attention (NSA): attention to compressed blocks, selected blocks and a window, combined by gates."""

from __future__ import annotations

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
    Paged,
    Paper,
    Shape,
    StateSpecs,
    Step,
    Window,
    hookimpl,
)
from attn_core.cost import SelectedBlockPairs
from attn_core.kernels.selected import SelectedBlocksSpec

from attn_sparse.nsa.options import NsaConfig

if TYPE_CHECKING:
    from attn_sparse.nsa.branches import Branches


class Nsa(DeclaredMechanism):
    """Every query attends to compressed keys of all past blocks, to all tokens of the best blocks, and to a window of
    recent tokens; gates weight the three outputs.

    The branches share keys and values, as in the code of flash-linear-attention; in the paper each has its own.
    """

    name = "nsa"
    counts_from_start = True  # blocks are counted from the first row
    summary = "attention to compressed blocks, selected blocks and a window, combined by gates"
    paper = Paper(
        title="Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention",
        authors="Yuan et al.",
        year=2025,
        arxiv="2502.11089",
    )
    equation = (
        r"O_i = \sum_{c \in \{\mathrm{cmp}, \mathrm{slc}, \mathrm{win}\}} \sigma(x_i W_c) \odot"
        r" \mathrm{softmax}\left(\frac{q_i {\tilde K}_i^{c\top}}{\sqrt{d_k}}\right) \tilde V_i^c,\quad"
        r" \tilde K^\mathrm{cmp}_b = \varphi(K_{[bs, bs + l)})"
    )
    sketch: ClassVar = {"compress": 2, "stride": 2, "select": 2, "top": 4, "window": 1}
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.WEIGHTS,
        Capability.NORMALISED,
    }
    Config = NsaConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention of the window branch."""
        window = Window(left=NsaConfig.of(config).window - 1)
        return AttentionSpec(heads=config.head_layout, mask=Causal() & window, rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> Branches:
        """The two other branches and the gates, with random weights."""
        from attn_sparse.nsa.branches import Branches

        return Branches(self.spec(config), NsaConfig.of(config))

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The window and the selected blocks by kernels, the compressed blocks by this module."""
        selected = Computation(part="selected blocks", asked=SelectedBlocksSpec(heads=config.head_layout))
        return Computation(part="window", asked=self.spec(config)), selected, Computation(part="compressed blocks")

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of all tokens, as a later query may select any block; nothing if they are another layer's."""
        if config.shares_kv:
            return {}
        heads = config.head_layout
        shapes = {"key": (heads.key_value, heads.key_size), "value": (heads.key_value, heads.value_size)}
        return {"kv": Paged({name: Field(shape) for name, shape in shapes.items()})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the window, of compressing all keys, of pairs with compressed and selected keys, and of gates.

        This is the cost of inference, where a block is only computed for the queries that chose it; in training it is
        computed for up to 63 more queries per block.
        """
        heads, own = config.head_layout, NsaConfig.of(config)
        queries = shape.batch * shape.query
        sizes = heads.key_size + heads.value_size
        blocks = own.compressed(shape.key)
        compression = 2 * shape.batch * blocks * heads.key_value * own.products
        pair = 2 * heads.query * sizes
        rest = compression + 2 * queries * config.hidden_size * 3 * heads.query
        selected = SelectedBlockPairs(block=own.select, top=own.top)
        weights = own.products + (own.compress * sizes if own.compression == "mlp" else 0)
        branches = Cost(
            flops=rest + pair * (queries * blocks + selected.met(shape)),
            allowed_flops=rest + pair * (own.compressed_seen(shape) + selected.allowed(shape)),
            parameters=weights + 3 * heads.query * (config.hidden_size + own.gate_bias),
        )
        return super().cost(config, shape) + branches


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Nsa()]
