"""The layer between attentions: two or three matrices applied to each token alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from attn_core.kernels.block import GatedParts
from attn_core.kernels.linear import Pack
from attn_core.kernels.rowwise import Activation
from torch import Tensor, nn

from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.gate import gated


class FeedForward(nn.Module):
    """W₂ f(W₁ x + b₁) + b₂ (Vaswani et al. 2017, section 3.3), f a GELU (arXiv 1606.08415) or ReLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down: nn.Module = nn.Linear(config.inner_width, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.feed_forward]()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        mixed: Tensor = self.down(self.activation(self.up(hidden)))
        return mixed

    def pack(self, pack: Pack) -> None:
        """Pack both matrices for serving."""
        self.up, self.down = pack([cast("nn.Linear", self.up)]), pack([cast("nn.Linear", self.down)])


class GatedFeedForward(nn.Module):
    """W₂ (f(W_g x) ⊙ W₁ x) (Shazeer 2020, arXiv 2002.05202), f a SiLU (SwiGLU) or GELU (GEGLU)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation: Activation = GATES[config.feed_forward]
        self.gate: Any = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.up: Any = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down: nn.Module = nn.Linear(config.inner_width, config.width, bias=config.bias)
        self.both: nn.Module | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        gate, up = (self.gate(hidden), self.up(hidden)) if self.both is None else self.both(hidden).chunk(2, dim=-1)
        mixed: Tensor = self.down(gated(gate, up, self.activation))
        return mixed

    def pack(self, pack: Pack) -> None:
        """Pack the matrices for serving, gate and up as one."""
        self.both, self.down = pack([self.gate, self.up]), pack([cast("nn.Linear", self.down)])
        self.gate = self.up = None

    def parts(self) -> GatedParts | None:
        """What the layer is made of once it is packed."""
        return None if self.both is None else GatedParts(both=self.both, down=self.down)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
}

GATES: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def build_feed_forward(config: DecoderConfig) -> FeedForward | GatedFeedForward:
    """The feed-forward layer that the config names."""
    return GatedFeedForward(config) if config.feed_forward in GATES else FeedForward(config)
