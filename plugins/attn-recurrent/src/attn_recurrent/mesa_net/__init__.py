"""MesaNet: every token reads what a least-squares fit to all past keys and values predicts for its query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import Mechanism, MechanismConfig, Paper, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.mesa_net.config import MesaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.mesa_net.layer import MesaLayer


class MesaNet(GatedDeltaNet):
    """The memory holds the sums that a ridge regression of values on keys needs; a query reads the regression's value,
    which is solved exactly for every token.

    Sums decay by one factor per head and token. The authors' code solves by up to 30 steps of conjugate gradients.
    """

    name = "mesa_net"
    summary = "every query is answered by a ridge regression of all past values on their keys"
    used_by = ()
    paper = Paper(
        title="MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
        authors="von Oswald et al.",
        year=2025,
        arxiv="2506.05233",
    )
    equation = (
        r"o_t = H_t^\top (G_t + \mathrm{diag}(\lambda))^{-1} q_t,\quad"
        r" G_t = \gamma_t G_{t-1} + \beta_t k_t k_t^\top,\quad H_t = \gamma_t H_{t-1} + \beta_t k_t v_t^\top,\quad"
        r" \gamma_t = \sigma(w_\gamma^\top x_t + b_h),\quad \beta_t = \sigma(w_\beta^\top x_t + c_h),\quad"
        r" \lambda = \lambda_0 + \mathrm{softplus}(l)"
    )
    Config = MesaConfig

    def build(self, config: MechanismConfig) -> MesaLayer:
        """A new `MesaLayer`."""
        from attn_recurrent.mesa_net.layer import MesaLayer

        return MesaLayer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """The sizes of queries and keys in `filters`."""
        sizes = self.Config.of(config).sizes
        return {"filters": (sizes.into, sizes.into)}


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [MesaNet()]
