"""Native sparse attention (NSA): a compressed view, selected blocks and a window, joined by gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    Window,
    hookimpl,
)
from attn_core.errors import InvalidValue

from attn_nsa.options import NsaConfig

if TYPE_CHECKING:
    from attn_nsa.branches import Branches


class Nsa(DeclaredMechanism):
    """Every query reads averages of all past blocks, the best blocks whole, and its last tokens; gates weigh the three.

    Keys and values are shared by the branches, as in the code of flash-linear-attention; the paper gives each its own.
    """

    name = "nsa"
    summary = "compressed blocks, selected blocks and a window, joined by gates"
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
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.WEIGHTS,
        Capability.NORMALISED,
    }
    Config = NsaConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The branch of the window; raises `InvalidValue` where the config is not causal."""
        if not config.causal:
            raise InvalidValue.of("causal", config.causal, "True: mechanism 'nsa' chooses among past blocks")
        window = Window(left=NsaConfig.of(config).window - 1)
        return AttentionSpec(heads=config.head_layout, mask=Causal() & window, rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> Branches:
        """The two other branches and the gates, with random weights."""
        from attn_nsa.branches import Branches

        return Branches(self.spec(config), NsaConfig.of(config))

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The branch of the window asks a kernel; the two others are computed here."""
        return Computation(part="window", asked=self.spec(config)), Computation(part="compressed and selected blocks")

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of all tokens, if its own: a later query may select any block."""
        if config.borrows:
            return {}
        heads = config.head_layout
        shapes = {"key": (heads.key_value, heads.key_size), "value": (heads.key_value, heads.value_size)}
        return {"kv": Paged({name: Field(shape) for name, shape in shapes.items()})}

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """That of the window, of compressing all keys, of pairs with compressed and selected keys, and of the gates."""
        heads, own = config.head_layout, NsaConfig.of(config)
        queries = shape.batch * shape.query
        sizes = heads.key_size + heads.value_size
        blocks = own.compressed(shape.key)
        compression = (
            2 * shape.batch * blocks * heads.key_value * (own.compress + 1) * (heads.key_size**2 + heads.value_size**2)
        )
        pairs = 2 * heads.query * sizes
        gates = 2 * queries * config.width * 3 * heads.query
        every = compression + gates + pairs * queries * blocks
        allowed = every + pairs * queries * own.top * own.select
        flops = every + pairs * shape.batch * own.rows_met(heads.query // heads.key_value, shape) * own.select
        weights = (own.compress + 1) * (heads.key_size**2 + heads.value_size**2) + own.compress * sizes
        learned = Cost(
            flops=flops, allowed_flops=min(allowed, flops), parameters=weights + 3 * heads.query * (config.width + 1)
        )
        return super().cost(config, shape) + learned


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """What this plugin offers."""
    return [Nsa()]
