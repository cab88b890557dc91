"""Hard attention to annotations: one of them at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import Capability, MechanismConfig
from attn_core.distributions import Hard
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.hidden import HiddenConfig
from attn_variants.mechanisms.memory.alignment import CROSS
from attn_variants.mechanisms.memory.visual_soft import SoftVisual

if TYPE_CHECKING:
    from attn_variants.memory.visual import Gated


@dataclass(frozen=True, kw_only=True)
class HardConfig(HiddenConfig):
    """In training a share `mean_rate` of the calls takes the soft mean instead of a sample."""

    mean_rate: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mean_rate <= 1:
            raise InvalidValue.of("mean_rate", self.mean_rate, "a number from 0 to 1")


class HardVisual(SoftVisual):
    """As soft visual attention, but it looks at one annotation: a sample in training, the likeliest otherwise.

    In training the layer keeps what REINFORCE needs; `attn_variants.memory.reinforce` makes the loss of it.
    """

    name = "visual_hard"
    summary = "one annotation: sampled in training, the likeliest otherwise"
    equation = (
        r"s_t \sim \mathrm{Multinoulli}\left(\mathrm{softmax}_i"
        r"\left(v^\top \tanh(W_a a_i + W_d h_{t-1} + b)\right)\right),"
        r"\quad \hat z_t = \sigma(W_\beta h_{t-1})\, a_{s_t}"
    )
    capabilities = CROSS - {Capability.EXACT}
    Config = HardConfig
    distribution = Hard()
    drops_weights = False

    def inner(self, config: MechanismConfig) -> Gated:
        """The gate and the sampling, with random weights."""
        from attn_variants.memory.visual import Glimpse

        rate = HardConfig.of(config).mean_rate
        return Glimpse(self.spec(config), config.width, mean_rate=rate)
