"""Preconditioned Kimi Delta Attention: the preconditioner of `precond_deltanet`, and decays per channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attn_core import Mechanism, MechanismConfig, hookimpl

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.precond_deltanet import PrecondDeltaNet
from attn_recurrent.precond_kda.config import PrecondKdaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.precond_kda.layer import PrecondKdaLayer


class PrecondKimiDeltaAttention(PrecondDeltaNet):
    """Kimi Delta Attention, which writes a key scaled channel by channel: less where its channels have been used much.

    The energies of channels are those of `precond_deltanet`, but each head has its own, also where heads share keys.
    """

    name = "precond_kda"
    summary = "the delta rule with decays per channel and writes scaled by the past energy of each channel of the keys"
    equation = (
        r"S_t = (I - \beta_t \tilde k_t k_t^\top)\,\mathrm{diag}(\alpha_t) S_{t-1} + \beta_t \tilde k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad \tilde k_t = k_t \odot c^{-r_t / (1 + |r_t|)},\quad"
        r" r_t = \log A_t - a_h,\quad A_t = \alpha'_t A_{t-1} + \beta'_t k_t \odot k_t,\quad"
        r" y_t = W_O\left(\mathrm{norm}(o_t) \odot \sigma(W_4 W_3 x_t)\right)"
    )
    sketch: ClassVar = {"rank": 2}
    Config = PrecondKdaConfig

    def build(self, config: MechanismConfig) -> PrecondKdaLayer:
        """A new `PrecondKdaLayer`."""
        from attn_recurrent.precond_kda.layer import PrecondKdaLayer

        return PrecondKdaLayer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Those of `gated_deltanet`, and the numbers of strengths of writes, those of energies, and their decays."""
        sizes = self.Config.of(config).sizes
        parts = {"strength.weight": (sizes.key_heads, sizes.heads, sizes.heads)}
        return {**GatedDeltaNet.joint_parameters(self, config), **parts}


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [PrecondKimiDeltaAttention()]
