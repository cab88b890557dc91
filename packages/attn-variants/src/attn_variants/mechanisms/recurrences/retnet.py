"""Retention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import Capability, MechanismConfig, Paper, Rotary
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.recurrences.recurrence import CAUSAL_ONLY, Extra, Recurrence, RecurrenceConfig
from attn_variants.recurrences.price import Update


class Retention(Recurrence):
    """Products of queries and keys fade at a fixed rate, each head at its own; the result is normed and gated.

    The model's rotary positions turn queries and keys where the model has some, else those of the option `base`.
    Outputs are normed a head by their root mean square, as in the authors' code, so its rescaling of the scores, which
    the norm undoes, is left out.
    """

    name = "retnet"
    summary = "retention: scores fade exponentially with the distance, at a fixed rate a head"
    paper = Paper(
        title="Retentive Network: A Successor to Transformer for Large Language Models",
        authors="Sun et al.",
        year=2023,
        arxiv="2307.08621",
    )
    equation = (
        r"S_t = \gamma_h S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t,\quad \gamma_h = 1 - 2^{-5-h},\quad"
        r" y_t = W_O\left(\mathrm{swish}(W_G x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    capabilities = CAUSAL_ONLY | {Capability.ROTARY}
    update = Update(decay="head")

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`base` of the rotary angles, None to turn nothing; values are twice as wide as keys, as in the paper."""

        base: float | None = 10000.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.base is not None and not self.base > 1:
                raise InvalidValue.of("base", self.base, "a number above 1, or None")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `RetentionLayer`; raises as `heads` does, and `InvalidValue` for an odd rotary size."""
        from attn_variants.recurrences.layers.retnet import RetentionLayer

        own = self.Config.of(config)
        turned = None if own.base is None else Rotary(base=own.base, interleaved=True)
        return RetentionLayer(
            self.heads(config),
            width=config.width,
            bias=config.bias,
            chunk=own.chunk,
            rotary=config.rotary or turned,
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The gate."""
        heads = self.heads(config)
        return Extra(linear=config.width * heads.query * heads.value_size)

    def value_size(self, head_size: int) -> int:
        """Twice the head size."""
        return 2 * head_size
