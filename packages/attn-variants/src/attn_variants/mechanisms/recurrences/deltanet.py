"""DeltaNet."""

from __future__ import annotations

from typing import Any

from attn_core import MechanismConfig, Paper

from attn_variants.mechanisms.recurrences.recurrence import ConvolvedConfig, Extra, Recurrence
from attn_variants.recurrences.price import Update


class DeltaNet(Recurrence):
    """A key writes only what the memory does not yet say about it, so what it held before is replaced, not added to.

    Queries and keys pass a short convolution and SiLU and have length one; values pass the convolution too. With
    strength 1 a key overwrites; with 0 it writes nothing.
    """

    name = "deltanet"
    summary = "the delta rule: a key replaces what the memory held for it"
    paper = Paper(
        title="Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        authors="Yang et al.",
        year=2024,
        arxiv="2406.06484",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},"
        r"\quad \beta_t = \sigma(w_\beta^\top x_t),\quad y_t = W_O\,\mathrm{norm}(o_t)"
    )
    update = Update(corrects=True)
    Config = ConvolvedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `DeltaLayer`; raises as `heads` does."""
        from attn_variants.recurrences.layers.deltanet import DeltaLayer

        own = ConvolvedConfig.of(config)
        return DeltaLayer(
            self.heads(config), width=config.width, bias=config.bias, chunk=own.chunk, taps=own.convolution
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The strengths, one a head, and the norm."""
        return Extra(linear=config.width * config.heads, other=self.heads(config).value_size)
