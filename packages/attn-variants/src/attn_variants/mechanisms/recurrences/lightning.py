"""Lightning attention."""

from __future__ import annotations

from typing import Any

from attn_core import MechanismConfig, Paper

from attn_variants.mechanisms.recurrences.recurrence import Extra, Recurrence, RecurrenceConfig, Update


class LightningAttention(Recurrence):
    """Linear attention on SiLU features that fades at fixed slopes, those of ALiBi; all heads are normed as one."""

    name = "lightning"
    summary = "linear attention that fades at a fixed slope a head"
    paper = Paper(
        title="Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models",
        authors="Qin et al.",
        year=2024,
        arxiv="2401.04658",
    )
    equation = (
        r"S_t = e^{-m_h} S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t,\quad m_h = 2^{-8h/H},\quad"
        r" q, k, v = \mathrm{silu}(W x),\quad y_t = W_O\,\mathrm{norm}(o_t)"
    )
    update = Update(decay="head")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `LightningLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.recurrences.decay_layers import LightningLayer

        own = RecurrenceConfig.of(config)
        return LightningLayer(self.heads(config), width=config.width, bias=config.bias, chunk=own.chunk)

    def extras(self, config: MechanismConfig) -> Extra:
        """The norm."""
        heads = self.heads(config)
        return Extra(other=heads.query * heads.value_size)
