"""Gated DeltaNet-2: the gated delta rule with separate gates for what is erased and what is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attn_core import Capability, Mechanism, MechanismConfig, Paper, hookimpl
from attn_core.checks import require_whole

from attn_recurrent.gated_deltanet import GatedDeltaNet
from attn_recurrent.gated_deltanet.config import GatedDeltaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_recurrent.gated_deltanet2.layer import GatedDelta2Layer


@dataclass(frozen=True, kw_only=True)
class GatedDelta2Config(GatedDeltaConfig):
    """The options of `gated_deltanet`; `allow_neg_eigval` doubles the gates that erase. `rank` is that of the decays
    and of the output gates, by default the value size of a head.
    """

    by_kernels: ClassVar[bool] = False
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("rank", self.rank, ge=1, unit="units", optional=True)

    @property
    def inner_size(self) -> int:
        """The rank of decays and output gates."""
        return self.rank or self.sizes.value

    @property
    def fades(self) -> int:
        """A decay for each channel of the keys."""
        return self.sizes.into

    @property
    def strengths(self) -> int:
        """A gate for each channel of the keys, which erases, and one for each of the values, which writes."""
        return self.sizes.into + self.sizes.out

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head: pairs of keys once, in a round of halving."""
        block = 1 << max(0, tokens - 1).bit_length()
        return 2 * block * (block - 1) * self.sizes.key + 2 * tokens**2 * self.sizes.value

    @property
    def gate_weights(self) -> int:
        """Decays and output gates of a low rank, and full gates of keys and values."""
        return self.hidden_size * self.strengths + self.inner_size * (
            2 * self.hidden_size + self.fades + self.sizes.out
        )

    @property
    def vectors(self) -> int:
        """A rate for each key head, and biases of decays and of output gates."""
        return self.sizes.key_heads + self.fades + self.sizes.out


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
