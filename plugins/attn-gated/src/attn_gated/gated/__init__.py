"""Gated attention: the output of each head is multiplied by a gate that depends on the query's token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Cost,
    DeclaredMechanism,
    Full,
    Mask,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    Window,
    hookimpl,
)
from attn_core.checks import checked, require_choice, require_number, require_whole
from attn_core.distributions import Softmax, SoftmaxWithSink
from attn_core.norms import QkNorm

if TYPE_CHECKING:
    from attn_gated.gated.gate import Gate

PER = ("element", "head")
ACTIVATIONS = ("sigmoid", "softplus")


class Gated(DeclaredMechanism):
    """Softmax attention whose outputs are multiplied by σ(x W_g), one gate per element or per head.

    The norms and the window of the families that gate are options, so that layers of one model may differ by them.
    """

    name = "gated"
    splits_heads = True
    summary = "a sigmoid gate on the output of each head"
    used_by = ("Qwen3-Next",)
    paper = Paper(
        title="Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free",
        authors="Qiu et al.",
        year=2025,
        arxiv="2505.06708",
    )
    equation = r"O = \sigma(X W_g) \odot \left(\mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V\right)"
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`per` "element" has a gate for every element of a head (the best in the paper), "head" one for each head.

        `activation` "softplus" replaces σ (Laguna). With `norm_eps` the queries and keys of every head are normalised
        first (Qwen3-Next). `window` is the number of visible tokens, the query's own included, None for all of them
        (AFMoE). With `sink` each head has a learned logit more in the denominator, as in gpt-oss.
        """

        per: str = checked("element", require_choice, PER)
        activation: str = checked("sigmoid", require_choice, ACTIVATIONS)
        norm_eps: float | None = checked(None, require_number, gt=0, optional=True)
        window: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)
        sink: bool = False

    drops_weights = True

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The softmax attention whose output is gated."""
        own = self.Config.of(config)
        return AttentionSpec(
            heads=own.head_layout,
            mask=mask_of(own),
            distribution=SoftmaxWithSink() if own.sink else Softmax(),
            norm=None if own.norm_eps is None else QkNorm(eps=own.norm_eps),
            rotary=own.rotary,
        )

    def inner(self, config: MechanismConfig) -> Gate:
        """The module of the gate, with random weights."""
        from attn_gated.gated.gate import Gate

        own = self.Config.of(config)
        return Gate(
            config.hidden_size,
            heads=config.num_heads,
            gates=gates_of(config),
            bias=config.bias,
            activation=own.activation,
        )

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention and of one more projection of the queries' hidden states."""
        gates = gates_of(config)
        flops = 2 * shape.batch * shape.query * config.hidden_size * gates
        biases = gates if config.bias else 0
        gate = Cost(flops=flops, allowed_flops=flops, parameters=config.hidden_size * gates + biases)
        return super().cost(config, shape) + gate


def mask_of(own: Gated.Config) -> Mask:
    """The tokens that a query sees: where bidirectional, half of the window on either side."""
    if own.window is None:
        return Causal() if own.causal else Full()
    return Window(left=own.window - 1) if own.causal else Window(left=own.window // 2, right=own.window // 2)


def gates_of(config: MechanismConfig) -> int:
    """The number of gates per token."""
    per_head = isinstance(config, Gated.Config) and config.per == "head"
    return config.num_heads if per_head else config.num_heads * config.head_layout.value_size


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Gated()]
