"""The delta rule: DeltaNet and Kimi Delta Attention (KDA)."""

from __future__ import annotations

from typing import Any

from attn_core import MechanismConfig, Paper

from attn_variants.mechanisms.recurrences.recurrence import ConvolvedConfig, Extra, Recurrence, Update


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
    update = Update(delta_rule=True)
    Config = ConvolvedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `DeltaLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.recurrences.delta_layers import DeltaLayer

        own = ConvolvedConfig.of(config)
        return DeltaLayer(
            self.heads(config), width=config.width, bias=config.bias, chunk=own.chunk, taps=own.convolution
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The strengths, one a head, and the norm."""
        return Extra(linear=config.width * config.heads, other=self.heads(config).value_size)


class KimiDeltaAttention(Recurrence):
    """The delta rule on a memory whose channels fade, each as every token says.

    Queries, keys and values pass a short convolution and SiLU; queries and keys have length one. The gates of the
    memory and of the output have the rank of a head's values.
    """

    name = "kda"
    summary = "the delta rule, and every channel of the memory fades as each token says"
    paper = Paper(
        title="Kimi Linear: An Expressive, Efficient Attention Architecture",
        authors="Kimi Team",
        year=2025,
        arxiv="2510.26692",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{diag}(\alpha_t) S_{t-1} + \beta_t k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad"
        r" \alpha_t = \exp\left(-e^{a_h}\,\mathrm{softplus}(W_2 W_1 x_t + b)\right),\quad"
        r" y_t = W_O\left(\sigma(W_4 W_3 x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="channel", delta_rule=True)
    Config = ConvolvedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `KimiDeltaLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.recurrences.delta_layers import KimiDeltaLayer

        own = ConvolvedConfig.of(config)
        return KimiDeltaLayer(
            self.heads(config), width=config.width, bias=config.bias, chunk=own.chunk, taps=own.convolution
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The strengths, the two low-rank gates, the rates and biases of the decay, and the norm."""
        heads = self.heads(config)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        gates = heads.value_size * (2 * config.width + into + out)
        return Extra(linear=gates + config.width * heads.query, other=heads.query + into + heads.value_size)
