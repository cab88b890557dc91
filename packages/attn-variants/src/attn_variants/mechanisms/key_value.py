"""Key-value attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    StateSpecs,
    Step,
    Window,
)
from attn_core.checks import checked, require_whole

from attn_variants.mechanisms.common import BASIC

PAPER = Paper(
    title="Frustratingly Short Attention Spans in Neural Language Modeling",
    authors="Daniluk et al.",
    year=2017,
    arxiv="1702.04521",
)


@dataclass(frozen=True, kw_only=True)
class KeyValueConfig(MechanismConfig):
    """`window` is the number of previous tokens that a token attends to; the paper finds about five sufficient."""

    window: int = checked(5, require_whole, ge=1, unit="tokens")


class KeyValue(ComputedMechanism):
    """Splits each hidden state into a key, which is compared, and a value, which is read and combined with the output.

    The query of a token is its own key. A token does not attend to itself; the first token reads zeros.
    """

    name = "key_value"
    summary = "hidden states split into a key that is compared and a value that is read"
    paper = PAPER
    equation = (
        r"h_t = [k_t; v_t],\quad"
        r" \alpha_t = \mathrm{softmax}_{t-L \le i < t}\left(w^\top \tanh(W_Y k_i + W_h k_t)\right),"
        r"\quad h_t^* = \tanh\left(W_r \sum_i \alpha_t^i v_i + W_x v_t\right)"
    )
    sketch: ClassVar = {"window": 3}
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.WEIGHTS,
            Capability.PADDING,
        }
    )
    Config = KeyValueConfig
    parts: ClassVar[int] = 2

    def build(self, config: MechanismConfig) -> Any:
        """A new `KeyValueLayer`; raises `InvalidValue` unless the key/value heads divide the heads."""
        from attn_variants.mechanisms.key_value_layer import KeyValueLayer

        heads, window = config.head_layout, window_of(config)
        return KeyValueLayer(heads, hidden_size=config.hidden_size, bias=config.bias, window=window, parts=self.parts)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The projected keys W_Y k and the values of the window and of the newest token."""
        row = Field((config.num_heads, config.head_layout.key_size))
        return {"kv": Paged({"key": row, "value": row}, window=window_of(config) + 1)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections, and of a score and a weighted value for every place of the window, used or not.

        A step computes scores for the cached tokens of the window and for all of its own tokens.
        """
        size = config.head_layout.key_size
        inner = config.num_heads * size
        weights = (self.parts + 1) * config.hidden_size * inner + 4 * inner * size
        tokens, window = shape.batch * shape.query, window_of(config)
        scored = min(shape.remembered, window) + shape.query if isinstance(shape, Step) else window
        seen = Window(left=window).count(shape.query, shape.key) - shape.query
        biases = self.parts * inner + config.hidden_size if config.bias else 0
        return Cost(
            flops=tokens * (2 * weights + 4 * scored * inner),
            allowed_flops=tokens * 2 * weights + shape.batch * 4 * seen * inner,
            parameters=weights + inner + biases,
        )


class KeyValuePredict(KeyValue):
    """Key-value attention with a third part of each hidden state, which is used only by the output, for prediction."""

    name = "key_value_predict"
    summary = "hidden states split into a key, a value and a part that predicts the next token"
    equation = (
        r"h_t = [k_t; v_t; p_t],\quad"
        r" \alpha_t = \mathrm{softmax}_{t-L \le i < t}\left(w^\top \tanh(W_Y k_i + W_h k_t)\right),"
        r"\quad h_t^* = \tanh\left(W_r \sum_i \alpha_t^i v_i + W_x p_t\right)"
    )
    parts = 3


def window_of(config: MechanismConfig) -> int:
    """The number of previous tokens that a token attends to."""
    return KeyValueConfig.of(config).window
