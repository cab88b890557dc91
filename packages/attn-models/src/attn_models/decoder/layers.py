"""Parts of a Transformer block: normalisation, feed-forward layers and their initialisation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from attn_core.joint import Joins, joint_outputs
from attn_core.kernels.block import GatedParts
from attn_core.kernels.linear import Pack
from attn_core.kernels.rowwise import Activation, GateKernel, NormKernel, row_result
from attn_schema.decoder import FeedForwardConfig, NormConfig
from torch import Tensor, nn
from torch.nn import functional

from attn_models.attention import LayerAttention

Result = TypeVar("Result")


class MixedPrecisionRMSNorm(nn.RMSNorm):
    """RMSNorm whose gain may have a wider dtype than its input, as in Gemma; it is then computed in the wider dtype."""

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise `rows` [..., width]; the result has their shape and dtype."""
        found = self._fused("plain", lambda kernel, eps: kernel.norm(rows, self.weight, eps), rows)
        if found is not None:
            return found
        if rows.dtype == self.weight.dtype:
            return super().forward(rows)
        return super().forward(rows.to(self.weight.dtype)).to(rows.dtype)

    def of_sum(self, rows: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The sum `rows` + `added`, both [..., width], and its norm, by a fused kernel if there is one.

        Under autocast `rows` may be float32 and `added` bfloat16: their sum is float32.
        """
        if torch.promote_types(rows.dtype, added.dtype) is rows.dtype:
            found = self._fused(
                "added", lambda kernel, eps: kernel.norm_sum(rows, added, self.weight, eps), rows, added
            )
            if found is not None:
                return found
        total = rows + added
        return total, self(total)

    def _fused(self, form: str, compute: Callable[[NormKernel, float], Result | None], *rows: Tensor) -> Result | None:
        eps = self.eps
        if torch.compiler.is_compiling() or eps is None:
            return None
        return row_result(NormKernel, form, lambda kernel: compute(kernel, eps), *rows, self.weight)


def normed_sum(norm: nn.Module, rows: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The sum `rows` + `added`, and its norm."""
    if isinstance(norm, MixedPrecisionRMSNorm):
        return norm.of_sum(rows, added)
    total = rows + added
    return total, norm(total)


def build_norm(config: NormConfig) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) over the width."""
    if config.norm == "rms":
        return MixedPrecisionRMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.has_bias("norm_bias"))


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, [..., width] each, by a fused kernel if there is one."""
    found = None
    if gate.dtype == up.dtype and not torch.compiler.is_compiling():
        found = row_result(GateKernel, activation, lambda kernel: kernel.gated(gate, up, activation), gate, up)
    return PLAIN[activation](gate) * up if found is None else found


def _by_tanh(rows: Tensor) -> Tensor:
    return functional.gelu(rows, approximate="tanh")


PLAIN: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _by_tanh,
}


class FeedForward(nn.Module):
    """W₂ f(W₁ x + b₁) + b₂ (Vaswani et al. 2017, section 3.3), f a GELU (arXiv 1606.08415), ReLU or SiLU."""

    def __init__(self, config: FeedForwardConfig) -> None:
        super().__init__()
        biased = config.has_bias("feed_forward_bias")
        self.up: nn.Module = nn.Linear(config.hidden_size, config.inner_width, bias=biased)
        self.down: nn.Module = nn.Linear(config.inner_width, config.hidden_size, bias=biased)
        self.activation = ACTIVATIONS[config.feed_forward]()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` [..., width] to [..., width]."""
        mixed: Tensor = self.down(self.activation(self.up(hidden)))
        return mixed

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize both matrices for inference."""
        self.up, self.down = pack([cast("nn.Linear", self.up)]), pack([cast("nn.Linear", self.down)])


class GatedFeedForward(nn.Module):
    """W₂ (f(W_g x) ⊙ W₁ x) (Shazeer 2020, arXiv 2002.05202), f a SiLU (SwiGLU) or GELU (GEGLU)."""

    def __init__(self, config: FeedForwardConfig) -> None:
        super().__init__()
        self.activation: Activation = GATES[config.feed_forward]
        biased = config.has_bias("feed_forward_bias")
        self.gate: Any = nn.Linear(config.hidden_size, config.inner_width, bias=biased)
        self.up: Any = nn.Linear(config.hidden_size, config.inner_width, bias=biased)
        self.down: nn.Module = nn.Linear(config.inner_width, config.hidden_size, bias=biased)
        self.both: nn.Module | None = None
        self.joins: Joins | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` [..., width] to [..., width]."""
        if self.both is None:
            gate, up = joint_outputs(hidden, self.joint_layers(), self.joins)
        else:
            gate, up = self.both(hidden).chunk(2, dim=-1)
        return joint_outputs(self.meet(gate, up), [self.down], self.joins)[0]

    def joint_layers(self) -> list[nn.Linear]:
        """The two layers that read the input, which may be computed as one product; empty once they are prepacked."""
        return [] if self.both is not None else [self.gate, self.up]

    def meet(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine the two projections, [..., inner width] each: f(gate) ⊙ up."""
        return gated(gate, up, self.activation)

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the matrices for inference, gate and up as one."""
        self.both, self.down = pack([self.gate, self.up]), pack([cast("nn.Linear", self.down)])
        self.gate = self.up = None

    def parts(self) -> GatedParts | None:
        """The prepacked matrices for a fused block kernel; None before they are prepacked."""
        return None if self.both is None else GatedParts(both=self.both, down=self.down, activation=self.activation)


class ClampedGatedFeedForward(GatedFeedForward):
    """W₂ (g σ(1.702 g) ⊙ (u + 1)), g = min(W_g x, 7) and u = W₁ x clamped to ±7 (gpt-oss, arXiv 2508.10925)."""

    sharpness, limit = 1.702, 7.0

    def meet(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine g = W_g x and u = W₁ x, [..., inner width] each, as in the class's docstring."""
        held = gate.clamp(max=self.limit)
        return held * torch.sigmoid(self.sharpness * held) * (up.clamp(-self.limit, self.limit) + 1)

    def parts(self) -> None:
        """None: fused block kernels do not clamp."""


class QuickGelu(nn.Module):
    """x σ(1.702 x), CLIP's approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""

    def forward(self, rows: Tensor) -> Tensor:
        """Apply the activation to each element."""
        return rows * torch.sigmoid(1.702 * rows)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGelu,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}

GATES: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu_clamped": "silu"}


def build_feed_forward(config: FeedForwardConfig) -> Any:
    """The feed-forward that the config names, a `FeedForward` or a `GatedFeedForward`; the identity for "none"."""
    if config.feed_forward == "none":
        return nn.Identity()
    if config.feed_forward == "swiglu_clamped":
        return ClampedGatedFeedForward(config)
    return GatedFeedForward(config) if config.feed_forward in GATES else FeedForward(config)


STANDARD = 0.02
INTO_RESIDUAL = re.compile(r"attention\.output|feed_forward(\.experts\.\d+|\.shared)?\.down")


def initialise_block(block: nn.Module, attention: LayerAttention, layers: int) -> None:
    """Initialise a block, with output projections scaled by 1/√(2 `layers`) (GPT-2, section 2.3).

    A mechanism without an `AttentionSpec` keeps its own initialisation.
    """
    own = attention.mechanism.spec(attention.config) is None
    for name, module in block.named_modules():
        if not (own and name.startswith("attention.")):
            initialise(module, STANDARD / math.sqrt(2 * layers) if INTO_RESIDUAL.fullmatch(name) else STANDARD)


def initialise(module: nn.Module, deviation: float = STANDARD) -> None:
    """Initialise a linear layer or embedding with normal weights and zero biases, as GPT-2 (Radford et al. 2019)."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
