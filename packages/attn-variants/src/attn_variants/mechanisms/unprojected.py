"""Attention of recurrent decoders, with learned projections or, as in their papers, over the states themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import Cost, DeclaredMechanism, MechanismConfig, Shape, Step
from attn_core.checks import checked, require_choice
from attn_core.errors import InvalidValue

PROJECTIONS = ("all", "none")
STATES = (
    r"\quad (q, k, v) = (W_Q s, W_K h, W_V h),\ c = W_O \textstyle\sum_j \alpha_j v_j;\quad"
    r" \text{projections = none: } q = s,\ k = v = h,\ W_O = I"
)
"""The end of an equation: queries, keys and values in terms of the decoder's states s and the source's states h."""


@dataclass(frozen=True, kw_only=True)
class StatesConfig(MechanismConfig):
    """With `projections` "all", queries, keys, values and output each have a learned matrix. With "none", as in the
    paper, the score compares the states themselves and the output is their weighted sum: one head, as wide as the
    states, without biases.
    """

    projections: str = checked("all", require_choice, PROJECTIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projections == "all":
            return
        if self.num_heads != 1:
            raise InvalidValue.of(
                "num_heads", self.num_heads, "1 with projections 'none', as states are not split into heads"
            )
        if self.head_dim not in {None, self.hidden_size}:
            allowed = f"hidden_size {self.hidden_size} with projections 'none', as keys are the states themselves"
            raise InvalidValue.of("head_dim", self.head_dim, allowed)
        if self.bias:
            raise InvalidValue.of(
                "bias", self.bias, "False with projections 'none', as there are no projections to add biases to"
            )


class StatesAttention(DeclaredMechanism):
    """Base class of mechanisms whose config is a `StatesConfig`: with `projections` "none" the layer has none."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """The layer of the spec, without projections if `projections` is "none"."""
        layer = super().build(config)
        if StatesConfig.of(config).projections == "none":
            layer.leave_out_projections()
        return layer

    def projection_cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The declared cost; without projections, the cost per state of the score and the distribution."""
        if StatesConfig.of(config).projections == "all":
            return super().projection_cost(config, shape)
        spec = self.spec(config)
        flops = shape.batch * (shape.query * spec.query_flops() + shape.encoded * spec.key_flops())
        return Cost(flops=flops, allowed_flops=flops, parameters=spec.parameters())
