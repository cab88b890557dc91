"""Mamba-2: state space duality, with one decay per head and token."""

from __future__ import annotations

from typing import Any

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
from attn_core.kernels.recurrent_step import RecurrentStepSpec

from attn_recurrent.mamba2.config import Mamba2Config, mamba2_step


class Mamba2(ComputedMechanism):
    """A state space model with one decay per head and token, computed as attention without a softmax.

    x, B and C pass a short convolution and SiLU; D is a skip connection from the input of each head; the output is
    gated by SiLU, then normalised per group.
    """

    name = "mamba2"
    summary = "state space duality: linear attention with a data-dependent scalar decay per head"
    paper = Paper(
        title="Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space"
        " Duality",
        authors="Dao and Gu",
        year=2024,
        arxiv="2405.21060",
    )
    equation = (
        r"S_t = e^{-\Delta_t a_h} S_{t-1} + \Delta_t B_t x_t^\top,\quad o_t = S_t^\top C_t + D_h x_t,\quad"
        r" \Delta_t = \mathrm{softplus}(w_h^\top u_t + b_h),\quad"
        r" y_t = W_O\,\mathrm{norm}\left(o_t \odot \mathrm{silu}(W_Z u_t)\right)"
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

    Config = Mamba2Config

    def build(self, config: MechanismConfig) -> Any:
        """A new `Mamba2Layer`; raises `InvalidValue` or `Incompatible` for a config that it does not support."""
        from attn_recurrent.mamba2.layer import Mamba2Layer

        own = Mamba2Config.of(config)
        return Mamba2Layer(
            own.sizes, hidden_size=own.hidden_size, bias=own.bias, chunk=own.chunk, norm_eps=own.norm_eps
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step that kernels may compute with in-place update of the states."""
        return mamba2_step(Mamba2Config.of(config).sizes)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One matrix per head in float32, and the last inputs of the convolution in the model's dtype."""
        sizes = Mamba2Config.of(config).sizes
        memory = {"S": Field((sizes.num_heads, sizes.state, sizes.head), dtype="float32")}
        if sizes.taps > 1:
            memory["tail"] = Field((sizes.taps - 1, sizes.channels))
        return {"memory": Slot(memory)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and the chunked recurrence as torch counts it: matrix products only."""
        own = Mamba2Config.of(config)
        sizes = own.sizes
        into = sizes.inner + sizes.channels + sizes.num_heads
        weights = own.hidden_size * (into + sizes.inner)
        whole, rest = divmod(shape.query, own.chunk)
        chunk_pairs = whole * own.chunk**2 + rest**2
        pairs = 2 * chunk_pairs * (sizes.groups * sizes.state + sizes.inner)
        memory = 2 * 2 * shape.query * sizes.inner * sizes.state
        projected = shape.batch * shape.query * 2 * weights
        return Cost(
            flops=projected + shape.batch * (pairs + memory),
            allowed_flops=projected + shape.batch * memory,
            parameters=weights
            + (into + own.hidden_size if own.bias else 0)
            + (sizes.taps + 1) * sizes.channels
            + 3 * sizes.num_heads
            + sizes.inner,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Mamba2()]
