"""Differential attention: the difference of two softmax maps, which cancels their common noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Cost,
    DeclaredMechanism,
    Full,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)
from attn_core.checks import checked, require_choice, require_number
from attn_core.errors import InvalidValue

if TYPE_CHECKING:
    from attn_gated.differential.difference import Difference


PAIRS = ("adjacent", "halves")


class Differential(DeclaredMechanism):
    """Heads in pairs: the second softmax map of a pair, times a learned λ, is subtracted from the first, and the result
    is applied to values twice as wide."""

    name = "differential"
    splits_heads = True
    summary = "the difference of two softmax maps, which cancels noise"
    paper = Paper(title="Differential Transformer", authors="Ye et al.", year=2024, arxiv="2410.05258")
    equation = (
        r"O = (1 - \lambda_\mathrm{init})\, \mathrm{RMSNorm}\left(\left(\mathrm{softmax}\left(\frac{Q_1 K_1^\top}"
        r"{\sqrt{d_k}} + M\right) - \lambda\, \mathrm{softmax}\left(\frac{Q_2 K_2^\top}{\sqrt{d_k}} + M\right)\right)"
        r" V\right),\quad \lambda = e^{\lambda_{q_1} \cdot \lambda_{k_1}} - e^{\lambda_{q_2} \cdot \lambda_{k_2}}"
        r" + \lambda_\mathrm{init}"
    )
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.NORMALISED, Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`num_heads` counts softmax maps, two for each head of the paper, so it must be even, and so must
        `num_kv_heads`.

        `lambda_init` is the part of λ that is not learned; by default it follows from `depth`, the number of layers
        below: 0.8 - 0.6 e^(-0.3 depth). `pairs` "adjacent" subtracts head 2i + 1 from head 2i and joins the values of
        neighbouring key/value heads, as the authors' code; "halves" pairs heads half of them apart (DiffLlama). With
        grouped heads these are different functions: the maps of adjacent heads share keys. `norm_eps` is that of the
        norm of a pair's output.
        """

        depth: int = 0
        lambda_init: float | None = None
        pairs: str = checked("adjacent", require_choice, PAIRS)
        norm_eps: float = checked(1e-5, require_number, gt=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("num_heads", "num_kv_heads"):
                count = getattr(self, name)
                if count is not None and count % 2:
                    raise InvalidValue.of(name, count, "an even number, as heads are subtracted in pairs")
            depth: Any = self.depth
            if not isinstance(depth, int) or depth < 0:
                raise InvalidValue.of("depth", depth, "a whole number from 0, the number of layers below this one")
            if self.lambda_init is not None and not 0 <= self.lambda_init < 1:
                raise InvalidValue.of("lambda_init", self.lambda_init, "a number from 0 and below 1, or None")

    drops_weights = True

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The softmax attention that computes every map."""
        return AttentionSpec(heads=config.head_layout, mask=Causal() if config.causal else Full(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> Difference:
        """The module that subtracts the maps, with random λ."""
        from attn_gated.differential.difference import Difference

        own = self.Config.of(config)
        return Difference(
            config.head_layout.key_size, initial=lambda_init(config), halves=own.pairs == "halves", eps=own.norm_eps
        )

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """With pairs that are half of the heads apart, each half is split by itself."""
        if self.Config.of(config).pairs == "adjacent":
            return {}
        heads = config.head_layout
        query, kept = heads.query // 2 * heads.key_size, heads.key_value // 2 * heads.key_size
        sizes = {"query": (query, query), "key": (kept, kept), "value": (kept, kept)}
        return {f"{name}.{kind}": both for name, both in sizes.items() for kind in ("weight", "bias")}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Twice the pairs of softmax attention, once for each half of the values, and the parameters of λ and norm."""
        once = super().cost(config, shape)
        fixed = self.projection_cost(config, shape)
        return Cost(
            flops=2 * once.flops - fixed.flops,
            allowed_flops=2 * once.allowed_flops - fixed.allowed_flops,
            parameters=once.parameters + 6 * config.head_layout.key_size,
        )


def lambda_init(config: MechanismConfig) -> float:
    """The part of λ that is not learned."""
    given = Differential.Config.of(config)
    return 0.8 - 0.6 * math.exp(-0.3 * given.depth) if given.lambda_init is None else given.lambda_init


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Differential()]
