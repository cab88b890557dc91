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
from attn_core.checks import require_whole

from attn_variants.mechanisms.common import BASIC

PAPER = Paper(
    title="Frustratingly Short Attention Spans in Neural Language Modeling",
    authors="Daniluk et al.",
    year=2017,
    arxiv="1702.04521",
)


@dataclass(frozen=True, kw_only=True)
class KeyValueConfig(MechanismConfig):
    """A token attends to the `window` tokens before it; the paper finds about five enough."""

    window: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("window", self.window, ge=1, unit="tokens")


class KeyValue(ComputedMechanism):
    """One part of a row is compared, another is read and joined with what is read: a key and a value.

    Queries are the newest keys. A token does not see itself; without a past it reads zeros.
    """

    name = "key_value"
    summary = "rows split into a key that is compared and a value that is read"
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
        """A fresh `KeyValueLayer`; raises `InvalidValue` where heads do not divide."""
        from attn_variants.mechanisms.key_value_layer import KeyValueLayer

        heads, window = config.head_layout, window_of(config)
        return KeyValueLayer(heads, hidden_size=config.hidden_size, bias=config.bias, window=window, parts=self.parts)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """W_Y k and values of the window and of the newest token."""
        row = Field((config.num_heads, config.head_layout.key_size))
        return {"kv": Paged({"key": row, "value": row}, window=window_of(config) + 1)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Projections per token, and a score and a read for every place of the window, taken or not.

        A step meets what is remembered of the window, and all its own tokens.
        """
        size = config.head_layout.key_size
        inner = config.num_heads * size
        weights = (self.parts + 1) * config.hidden_size * inner + 4 * inner * size
        tokens, window = shape.batch * shape.query, window_of(config)
        met = min(shape.remembered, window) + shape.query if isinstance(shape, Step) else window
        seen = Window(left=window).count(shape.query, shape.key) - shape.query
        biases = self.parts * inner + config.hidden_size if config.bias else 0
        return Cost(
            flops=tokens * (2 * weights + 4 * met * inner),
            allowed_flops=tokens * 2 * weights + shape.batch * 4 * seen * inner,
            parameters=weights + inner + biases,
        )


class KeyValuePredict(KeyValue):
    """As key-value attention, with a third part of the row that only the output sees: it predicts what comes next."""

    name = "key_value_predict"
    summary = "rows split into a key, a value and what predicts"
    equation = (
        r"h_t = [k_t; v_t; p_t],\quad"
        r" \alpha_t = \mathrm{softmax}_{t-L \le i < t}\left(w^\top \tanh(W_Y k_i + W_h k_t)\right),"
        r"\quad h_t^* = \tanh\left(W_r \sum_i \alpha_t^i v_i + W_x p_t\right)"
    )
    parts = 3


def window_of(config: MechanismConfig) -> int:
    """How many tokens back a token sees."""
    return KeyValueConfig.of(config).window
