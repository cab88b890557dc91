"""Gated DeltaNet: linear attention with the delta rule and a data-dependent decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import (
    Capability,
    Computation,
    ComputedMechanism,
    Cost,
    Field,
    Heads,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    hookimpl,
)
from attn_core.kernels.recurrence import RecurrenceSpec
from attn_core.kernels.recurrent_step import RecurrentStepSpec
from attn_core.splitting import option_of_rank

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


class GatedDeltaNet(ComputedMechanism):
    """The delta rule on a memory that decays by one factor per head and token, computed from the token.

    Queries, keys and values pass a short convolution and SiLU; queries and keys are normalised to length one. The
    output is normalised per head and gated by SiLU.
    """

    name = "gated_deltanet"
    splits_heads = True
    summary = "the delta rule with a data-dependent decay of the state"
    used_by: ClassVar[tuple[str, ...]] = ("Qwen3-Next",)
    paper = Paper(
        title="Gated Delta Networks: Improving Mamba2 with Delta Rule",
        authors="Yang et al.",
        year=2024,
        arxiv="2412.06464",
    )
    equation = (
        r"S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad \beta_t = \sigma(w_\beta^\top x_t),\quad"
        r" \alpha_t = \exp\left(-e^{a_h}\,\mathrm{softplus}(w_\alpha^\top x_t + b_h)\right),\quad"
        r" y_t = W_O\left(\mathrm{norm}(o_t) \odot \mathrm{silu}(W_G x_t)\right)"
    )
    capabilities = frozenset(
        {
            Capability.BIAS,
            Capability.HEAD_DIM,
            Capability.CAUSAL,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.PADDING,
            Capability.WEIGHTS,
        }
    )

    Config = GatedDeltaConfig

    def build(self, config: MechanismConfig) -> Any:
        """A new `GatedDeltaLayer`; raises `InvalidValue` or `Incompatible` for a config that it does not support."""
        from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer

        return GatedDeltaLayer(self.Config.of(config))

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """The sizes of queries, keys and values in `filters`, the convolution that they share; with several writes,
        those of each, also in the layers of keys, values and strengths."""
        sizes = self.Config.of(config).sizes
        keys, values = (sizes.into,) * sizes.writes, (sizes.out,) * sizes.writes
        several = {"key": keys, "value": values, "strength": (sizes.heads,) * sizes.writes} if sizes.writes > 1 else {}
        layers = {f"{name}.{part}": of_writes for name, of_writes in several.items() for part in ("weight", "bias")}
        return {"filters": (sizes.into, *keys, *values), **layers}

    def split_options(self, config: MechanismConfig, ranks: int) -> Mapping[str, Any]:
        """The option `key_heads` for a rank; raises `InvalidValue` if the ranks do not divide it."""
        return option_of_rank(self, "key_heads", self.Config.of(config).key_heads, ranks)

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The recurrence that kernels may compute in place of the layer."""
        own = self.Config.of(config)
        if not own.by_kernels:
            return None
        sizes = own.sizes
        layout = Heads(query=sizes.heads, key_value=sizes.heads, key_size=sizes.key, value_size=sizes.value)
        return RecurrenceSpec(heads=layout, decay="head", delta_rule=True)

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step that kernels may compute with in-place update of the states."""
        return self.Config.of(config).step

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """The recurrence, by a kernel only if it costs less than the layer's own plain computation."""
        return tuple(dataclasses.replace(call, below=1.0) for call in super().computations(config, tokens))

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One matrix per head in float32, and the last inputs of the convolution in the model's dtype."""
        own = self.Config.of(config)
        memory = {"S": Field(own.memory, dtype="float32")}
        if own.taps > 1:
            memory["tail"] = Field((own.taps - 1, own.convolved))
        return {"memory": Slot(memory)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and the chunked rule as torch counts it: matrix products, no triangular solves."""
        own = self.Config.of(config)
        sizes = own.sizes
        weights = own.hidden_size * (sizes.channels + sizes.out) + own.gate_weights
        whole, rest = divmod(shape.query * sizes.writes, own.chunk)
        pairs = whole * own.pair_flops(own.chunk) + own.pair_flops(rest)
        memory = shape.query * sizes.writes * own.token_flops()
        projected = shape.batch * shape.query * 2 * weights
        return Cost(
            flops=projected + shape.batch * sizes.heads * (pairs + memory),
            allowed_flops=projected + shape.batch * sizes.heads * memory,
            parameters=weights
            + (sizes.channels + own.hidden_size if own.bias else 0)
            + own.taps * own.convolved
            + own.vectors
            + sizes.value,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [GatedDeltaNet()]
