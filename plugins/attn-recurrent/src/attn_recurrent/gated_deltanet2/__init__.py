"""Gated DeltaNet-2: the gated delta rule with separate gates for what is erased and what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attn_core import Capability, Mechanism, MechanismConfig, Paper, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet2.config import GatedDelta2Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.gated_deltanet2.layer import GatedDelta2Layer


class GatedDeltaNet2(GatedDeltaNet):
    """The delta rule on a memory whose channels decay at rates of their own; one gate for each channel of a key says
    what the token erases, one for each channel of a value what it writes.

    With both gates equal to one number per head it is Kimi Delta Attention.
    """

    name = "gated_deltanet2"
    summary = "the delta rule with decays, gates of erasure and gates of writing for each channel"
    used_by = ()
    paper = Paper(title="Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention", authors="NVIDIA", year=2026)
    equation = (
        r"S_t = \left(I - k_t (b_t \odot k_t)^\top\right) \mathrm{diag}(\alpha_t) S_{t-1}"
        r" + k_t (w_t \odot v_t)^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad b_t = \sigma(W_b x_t),\quad"
        r" w_t = \sigma(W_w x_t),\quad y_t = W_O\left(\mathrm{norm}(o_t) \odot \sigma(W_4 W_3 x_t)\right)"
    )
    sketch: ClassVar = {"rank": 2}
    capabilities = GatedDeltaNet.capabilities - {Capability.WEIGHTS}
    Config = GatedDelta2Config

    def build(self, config: MechanismConfig) -> GatedDelta2Layer:
        """A new `GatedDelta2Layer`."""
        from attn_recurrent.gated_deltanet2.layer import GatedDelta2Layer

        return GatedDelta2Layer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Those of `gated_deltanet`, and the sizes of both kinds of gates in `strength`."""
        sizes = self.Config.of(config).sizes
        return {**super().joint_parameters(config), "strength.weight": (sizes.into, sizes.out)}


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [GatedDeltaNet2()]
