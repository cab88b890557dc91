"""Preconditioned Gated DeltaNet: keys are written scaled by how much energy their channels have had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import Mechanism, MechanismConfig, Paper, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.precond_deltanet.config import PrecondDeltaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.precond_deltanet.layer import PrecondDeltaLayer


class PrecondDeltaNet(GatedDeltaNet):
    """The gated delta rule, which writes a key scaled channel by channel: less where its channels have been used much.

    The energy of a channel is a decaying sum of its squares; it stands for the diagonal of a second-order method.
    """

    name = "precond_deltanet"
    summary = "the gated delta rule with writes scaled by the past energy of each channel of the keys"
    used_by = ()
    paper = Paper(
        title="Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences",
        authors="flash-linear-attention",
        year=2026,
        arxiv="2604.21100",
    )
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
