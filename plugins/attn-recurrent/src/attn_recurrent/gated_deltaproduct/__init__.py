"""Gated DeltaProduct: several steps of the delta rule for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import Capability, Mechanism, Paper, hookimpl
from attn_core.checks import checked, require_whole

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class DeltaProductConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`, here with strengths up to 2 by default. `num_householder` is the number of keys,
    values and strengths of a token.
    """

    by_kernels: ClassVar[bool] = False
    num_householder: int = checked(2, require_whole, ge=2)
    allow_neg_eigval: bool = True

    @property
    def writes(self) -> int:
        """The number of keys and values of a token."""
        return self.num_householder


class GatedDeltaProduct(GatedDeltaNet):
    """The memory of a head decays once for a token and is then corrected several times, each by a key of its own; so a
    token multiplies it by a product of Householder-like matrices, such as a rotation."""

    name = "gated_deltaproduct"
    summary = "the gated delta rule with several keys and values for each token"
    used_by = ()
    paper = Paper(
        title="DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products",
        authors="Siems et al.",
        year=2025,
        arxiv="2502.10297",
    )
    equation = (
        r"S_t = \alpha_t \prod_{i=1}^{n} (I - \beta_{ti} k_{ti} k_{ti}^\top) S_{t-1} + \sum_{i=1}^{n}"
        r" \prod_{j=i+1}^{n} (I - \beta_{tj} k_{tj} k_{tj}^\top) \beta_{ti} k_{ti} v_{ti}^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad \beta_{ti} = 2\,\sigma(w_i^\top x_t)"
    )
    capabilities = GatedDeltaNet.capabilities - {Capability.WEIGHTS}
    Config = DeltaProductConfig


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [GatedDeltaProduct()]
