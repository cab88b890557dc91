"""RWKV-7: a generalised delta rule with decays and rates per channel, and its feed-forward over two tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    Mechanism,
    MechanismConfig,
    ModelFamily,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    hookimpl,
)
from attn_core.checks import checked, require_whole

from attn_recurrent.rwkv7.config import Rwkv7Config, Rwkv7ModelConfig

if TYPE_CHECKING:
    from attn_recurrent.rwkv7.layer import ChannelMixLayer, Rwkv7Layer

RWKV7 = Paper(
    title='RWKV-7 "Goose" with Expressive Dynamic State Evolution', authors="Peng et al.", year=2025, arxiv="2503.14456"
)
ABLE = frozenset({Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING})


class Rwkv7(ComputedMechanism):
    """A state per head that decays per channel, from which one direction is erased, and to which a value is written."""

    name = "rwkv7"
    summary = "a generalised delta rule: decay, erasure and rate of learning per channel, computed from two tokens"
    used_by = ("RWKV-7",)
    sketch: ClassVar = {"decay_rank": 4, "rate_rank": 4, "gate_rank": 4}
    paper = RWKV7
    equation = (
        r"S_t = S_{t-1}\left(\mathrm{diag}(w_t) - \hat\kappa_t (a_t \odot \hat\kappa_t)^\top\right)"
        r" + v_t \tilde k_t^\top,\quad o_t = S_t r_t,\quad \hat\kappa_t = \frac{k_t \odot \xi}{\|k_t \odot \xi\|},\quad"
        r" \tilde k_t = k_t \odot (1 + (a_t - 1) \odot \alpha),\quad w_t = \exp\left(-e^{-1/2} \sigma(d_t)\right),\quad"
        r" y_t = W_O\left(g_t \odot (\mathrm{norm}(o_t) + (r_t^\top (\rho \odot \tilde k_t)) v_t)\right)"
    )
    capabilities = ABLE
    Config = Rwkv7Config

    def build(self, config: MechanismConfig) -> Rwkv7Layer:
        """A new `Rwkv7Layer`."""
        from attn_recurrent.rwkv7.layer import Rwkv7Layer

        return Rwkv7Layer(self.Config.of(config))

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One matrix per head in float32, and the last token."""
        size = config.hidden_size // config.num_heads
        memory = Field((config.num_heads, size, size), dtype="float32")
        return {"memory": Slot({"S": memory, "last": Field((config.hidden_size,))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and of the rule in chunks, without the triangular solves, as torch counts it."""
        own, width = self.Config.of(config), config.hidden_size
        size, ranks = width // config.num_heads, own.decay_rank + own.rate_rank + own.gate_rank
        weights = 4 * width**2 + 2 * width * ranks
        whole, rest = divmod(shape.query, own.chunk)
        pairs = 2 * (whole * own.chunk**2 + rest**2) * 7 * size
        memory = 8 * shape.query * size**2
        projected = 2 * shape.batch * shape.query * weights
        return Cost(
            flops=projected + shape.batch * config.num_heads * (pairs + memory),
            allowed_flops=projected + shape.batch * config.num_heads * memory,
            # Mixing weights, scales of keys and values, biases of two networks, and the norm of heads.
            parameters=weights + (6 + 3 + 2 + 2) * width,
        )


class Rwkv7Channel(ComputedMechanism):
    """A feed-forward with squared ReLU over the token and the one before it, mixed per channel."""

    name = "rwkv7_channel"
    summary = "a feed-forward with squared ReLU whose input mixes each token with the one before it"
    used_by = ("RWKV-7",)
    paper = RWKV7
    equation = r"y_t = W_2\, \mathrm{ReLU}\left(W_1 (x_t + \mu \odot (x_{t-1} - x_t))\right)^2"
    capabilities = ABLE

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`inner` is the inner size, four times the model's by default."""

        inner: int | None = checked(None, require_whole, ge=1, optional=True)

        @property
        def inner_size(self) -> int:
            """The inner size."""
            return self.inner or 4 * self.hidden_size

    def build(self, config: MechanismConfig) -> ChannelMixLayer:
        """A new `ChannelMixLayer`."""
        from attn_recurrent.rwkv7.layer import ChannelMixLayer

        return ChannelMixLayer(config.hidden_size, self.Config.of(config).inner_size)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The last token."""
        return {"memory": Slot({"last": Field((config.hidden_size,))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of both products."""
        weights = 2 * config.hidden_size * self.Config.of(config).inner_size
        flops = 2 * shape.batch * shape.query * weights
        return Cost(flops=flops, allowed_flops=flops, parameters=weights + config.hidden_size)


class Rwkv7Family(ModelFamily):
    """RWKV-7, with random weights."""

    name = "rwkv7"
    summary = "RWKV-7: layers of both kinds in turns, the later of which mix in the values of the first (2025)."
    Config = Rwkv7ModelConfig

    def configure(self, values: Mapping[str, Any]) -> Rwkv7ModelConfig:
        """The config of plain values; layers alternate between both mechanisms unless they name others."""
        return Rwkv7ModelConfig.from_plain(values)

    def build(self, config: Rwkv7ModelConfig) -> Any:
        """A new `Rwkv7Decoder`."""
        from attn_recurrent.rwkv7.model import Rwkv7Decoder

        return Rwkv7Decoder(config)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Rwkv7(), Rwkv7Channel()]
