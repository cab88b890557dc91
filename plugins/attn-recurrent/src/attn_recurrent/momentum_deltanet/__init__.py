"""Momentum DeltaNet: the delta rule as gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import Mechanism, MechanismConfig, Paper, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.momentum_deltanet.config import MomentumDeltaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.momentum_deltanet.layer import MomentumDeltaLayer


class MomentumDeltaNet(GatedDeltaNet):
    """A second matrix per head collects the corrections of the delta rule, decays, and is what the memory moves by.

    A part of the key is taken from the query, as in `comba`.
    """

    name = "momentum_deltanet"
    summary = "the gated delta rule with momentum: corrections are collected in a second matrix per head"
    used_by = ()
    paper = Paper(title="Momentum DeltaNet", year=2026, arxiv="2605.05838")
    equation = (
        r"S_t = \alpha_t S_{t-1} - \beta_t M_t,\quad"
        r" M_t = \mu_t M_{t-1} - \eta_t k_t (v_t - \alpha_t S_{t-1}^\top k_t)^\top,\quad"
        r" o_t = \frac{S_t^\top \hat q_t}{\sqrt{d_k}},\quad"
        r" \beta_t = \frac{\sigma(w_\beta^\top x_t)\, z_t^2}{1 + z_t^2},\quad"
        r" \alpha_t = \frac{\alpha'_t}{1 + z_t^2},\quad z_t = e^{f_h} \eta_t,\quad"
        r" \eta_t = 1 + \tanh(w_\eta^\top x_t / \sqrt{D})"
    )
    Config = MomentumDeltaConfig

    def build(self, config: MechanismConfig) -> MomentumDeltaLayer:
        """A new `MomentumDeltaLayer`."""
        from attn_recurrent.momentum_deltanet.layer import MomentumDeltaLayer

        return MomentumDeltaLayer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Those of `gated_deltanet`, and the numbers of memories and of momenta in what both have."""
        both = (config.num_heads, config.num_heads)
        joint = dict.fromkeys(("fade.weight", "strength.weight", "rate", "fade_bias"), both)
        return {**super().joint_parameters(config), **joint}


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [MomentumDeltaNet()]
