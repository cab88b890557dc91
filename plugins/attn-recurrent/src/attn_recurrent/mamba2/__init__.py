"""Mamba-2: state space duality, with one decay per head and token."""

from __future__ import annotations

from typing import Any, ClassVar

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

from attn_recurrent.mamba2.config import Mamba2Config


class Mamba2(ComputedMechanism):
    """A state space model with one decay per head and token, computed as attention without a softmax.

    x, B and C pass a short convolution and SiLU; D is a skip connection from the input of each head; the output is
    gated by SiLU, then normalised per group.
    """

    name = "mamba2"
    summary = "state space duality: linear attention with a data-dependent scalar decay per head"
    used_by: ClassVar[tuple[str, ...]] = ("Nemotron-H", "Granite 4")
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

        return Mamba2Layer(Mamba2Config.of(config))

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step that kernels may compute with in-place update of the states."""
        return Mamba2Config.of(config).step

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One matrix per head in float32, and the last inputs of the convolution in the model's dtype."""
        own = Mamba2Config.of(config)
        memory = {"S": Field(own.memory, dtype="float32")}
        if own.taps > 1:
            memory["tail"] = Field((own.taps - 1, own.channels))
        return {"memory": Slot(memory)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and the chunked recurrence as torch counts it: matrix products only."""
        own = Mamba2Config.of(config)
        into = own.inner + own.channels + own.num_heads + own.further
        weights = own.hidden_size * (into + own.inner)
        whole, rest = divmod(shape.query, own.chunk)
        chunk_pairs = whole * own.chunk**2 + rest**2
        pairs = 2 * chunk_pairs * (own.groups * own.state_size + own.inner)
        memory = 2 * 2 * shape.query * own.inner * own.state_size
        projected = shape.batch * shape.query * 2 * weights
        return Cost(
            flops=projected + shape.batch * (pairs + memory),
            allowed_flops=projected + shape.batch * memory,
            parameters=weights
            + (into + own.hidden_size if own.bias else 0)
            + (own.taps + 1) * own.channels
            + 3 * own.num_heads
            + own.inner,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Mamba2()]
