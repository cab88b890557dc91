"""The gated short convolution of LFM2: a layer that mixes each token with the few before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    hookimpl,
)
from attn_core.checks import checked, require_whole

if TYPE_CHECKING:
    from attn_recurrent.short_conv.layer import ShortConvLayer


class ShortConv(ComputedMechanism):
    """A depthwise causal convolution between two gates, all of them projections of the same token.

    It has neither heads nor positions: hybrid models put it in most layers, and attention in the others.
    """

    name = "short_conv"
    summary = "a short causal convolution between two multiplicative gates"
    used_by = ("LFM2",)
    paper = Paper(title="LFM2 Technical Report", authors="Liquid AI", year=2025, arxiv="2511.23404")
    equation = (
        r"[b_t; c_t; u_t] = W_I x_t,\quad h_t = \sum_{j=0}^{L-1} w_j \odot b_{t-j} \odot u_{t-j},\quad"
        r" y_t = W_O (c_t \odot h_t)"
    )
    capabilities = frozenset(
        {Capability.BIAS, Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING}
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`taps` L is the number of tokens in the convolution, the newest included."""

        taps: int = checked(3, require_whole, ge=2)

    def build(self, config: MechanismConfig) -> ShortConvLayer:
        """A new `ShortConvLayer`."""
        from attn_recurrent.short_conv.layer import ShortConvLayer

        return ShortConvLayer(config.hidden_size, self.Config.of(config).taps, bias=config.bias)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The last inputs of the convolution."""
        return {"memory": Slot({"tail": Field((self.Config.of(config).taps - 1, config.hidden_size))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the two projections; the convolution is no matrix product and is not counted."""
        width, taps = config.hidden_size, self.Config.of(config).taps
        flops = shape.batch * shape.query * 2 * 4 * width**2
        biases = 5 * width if config.bias else 0
        return Cost(flops=flops, allowed_flops=flops, parameters=4 * width**2 + taps * width + biases)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [ShortConv()]
