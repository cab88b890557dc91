"""Preconditioned Gated DeltaNet: keys are written scaled by how much energy their channels have had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attn_core import Mechanism, MechanismConfig, Paper, hookimpl
from attn_core.checks import require_number

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.config import GatedDeltaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.precond_deltanet.layer import PrecondDeltaLayer


@dataclass(frozen=True, kw_only=True)
class PrecondDeltaConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`. Scales are between 1 / `squash` and `squash`, and 1 where the logarithm of the
    energy is that of a head's center, which is learned and `center` at first; `squash_eps` is added to energies.
    """

    by_kernels: ClassVar[bool] = False
    squash: float = 1.5
    squash_eps: float = 1e-6
    center: float = -0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("squash", self.squash, ge=1)
        require_number("squash_eps", self.squash_eps, gt=0)
        require_number("center", self.center)

    @property
    def fades(self) -> int:
        """The decays of the memories, and those of the energies of key heads."""
        return self.num_heads + self.sizes.key_heads

    @property
    def strengths(self) -> int:
        """The strengths of the writes, and those with which energies grow."""
        return self.num_heads + self.sizes.key_heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """A matrix for each head, and the energies of its channels as a further column."""
        return self.num_heads, self.sizes.key, self.sizes.value + 1

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head, those of energies among them."""
        return super().pair_flops(tokens) + 2 * tokens**2 * self.sizes.key

    @property
    def vectors(self) -> int:
        """Those of `gated_deltanet`, and the centers of key heads."""
        return super().vectors + self.sizes.key_heads


class PrecondDeltaNet(GatedDeltaNet):
    """The gated delta rule, which writes a key scaled channel by channel: less where its channels have been used much.

    The energy of a channel is a decaying sum of its squares; it stands for the diagonal of a second-order method.
    """

    name = "precond_deltanet"
    summary = "the gated delta rule with writes scaled by the past energy of each channel of the keys"
    used_by = ()
    paper = Paper(title="Preconditioned DeltaNet", authors="flash-linear-attention", year=2026)
    equation = (
        r"S_t = \alpha_t (I - \beta_t \tilde k_t k_t^\top) S_{t-1} + \beta_t \tilde k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad \tilde k_t = k_t \odot c^{-r_t / (1 + |r_t|)},\quad"
        r" r_t = \log A_t - a_h,\quad A_t = \alpha'_t A_{t-1} + \beta'_t k_t \odot k_t"
    )
    Config = PrecondDeltaConfig

    def build(self, config: MechanismConfig) -> PrecondDeltaLayer:
        """A new `PrecondDeltaLayer`."""
        from attn_recurrent.precond_deltanet.layer import PrecondDeltaLayer

        return PrecondDeltaLayer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Those of `gated_deltanet`, and the numbers of memories and of energies in what decays and writes both."""
        sizes = self.Config.of(config).sizes
        both = dict.fromkeys(("fade.weight", "strength.weight", "rate", "fade_bias"), (sizes.heads, sizes.key_heads))
        return {**super().joint_parameters(config), **both}


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [PrecondDeltaNet()]
