"""Comba: the delta rule with feedback from the memory before it decays, and corrected queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attn_core import Mechanism, MechanismConfig, Paper, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.config import GatedDeltaConfig

if TYPE_CHECKING:
    from attn_recurrent.comba.layer import CombaLayer


@dataclass(frozen=True, kw_only=True)
class CombaConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`. `correction` is the first value of D, which is learned for every head: how much
    of its key is taken from its query. The authors also use 0.02 in small models.
    """

    by_kernels: ClassVar[bool] = False
    correction: float = 1.0

    @property
    def vectors(self) -> int:
        """Those of `gated_deltanet`, and two numbers for each key head."""
        return super().vectors + 2 * self.sizes.key_heads


class Comba(GatedDeltaNet):
    """The gated delta rule as a closed loop: a value is compared with what the memory holds for its key before
    that decays, and a part of the key is taken from the query."""

    name = "comba"
    summary = "the gated delta rule with feedback from the memory before it decays, and corrected queries"
    used_by = ()
    paper = Paper(
        title="Comba: Improving Bilinear RNNs with Closed-loop Control",
        authors="Hu et al.",
        year=2025,
        arxiv="2506.02475",
    )
    equation = (
        r"S_t = \alpha_t S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top,\quad"
        r" o_t = \frac{S_t^\top \hat q_t}{\sqrt{d_k}},\quad"
        r" \hat q_t = \frac{q_t - D_h \sigma(b_h) k_t}{\|q_t - D_h \sigma(b_h) k_t\|},\quad"
        r" y_t = W_O\left(\mathrm{norm}(o_t) \odot \sigma(W_G x_t)\right)"
    )
    Config = CombaConfig

    def build(self, config: MechanismConfig) -> CombaLayer:
        """A new `CombaLayer`."""
        from attn_recurrent.comba.layer import CombaLayer

        own = self.Config.of(config)
        return CombaLayer(own, own.correction)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Comba()]
