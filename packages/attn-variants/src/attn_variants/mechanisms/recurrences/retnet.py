"""Retention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attn_core import Capability, MechanismConfig, Paper, Rotary
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.recurrences.recurrence import CAUSAL_ONLY, Extra, Recurrence, RecurrenceConfig, Update


class Retention(Recurrence):
    """Products of queries and keys fade at a fixed rate, each head at its own; the result is normed and gated.

    The model's rotary positions turn queries and keys where the model has some, else those of the option `base`.
    Outputs are normed a head by their root mean square, as in the authors' code, so its rescaling of the scores, which
    the norm undoes, is left out. With `scale_base` positions are xPos (Sun et al. 2022, arXiv 2212.10554), as the paper
    derives them: a pair of channels that turns slowly keeps more than one that turns fast. Its scales of queries and
    keys, ζ^n and ζ^-m, are the fading ζ^(n - m) of the memory's rows here, so that far positions overflow nothing.
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
        """`base` of the rotary angles, None to turn nothing; values are twice as wide as keys, as in the paper.

        `scale_base` tokens let pair p of d turned elements fade by the factor (2p/d + 0.4) / 1.4 of xPos, whose authors
        take 512; None lets nothing fade beside the head.
        """

        base: float | None = 10000.0
        scale_base: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.base is not None and not self.base > 1:
                raise InvalidValue.of("base", self.base, "a number above 1, or None")
            if self.scale_base is None:
                return
            if isinstance(self.scale_base, bool) or not 0 < self.scale_base < math.inf:
                raise InvalidValue.of("scale_base", self.scale_base, "a number of tokens above 0, or None")
            if self.base is None and self.rotary is None:
                raise InvalidValue.of("scale_base", self.scale_base, "None where no pairs are turned: give a base")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `RetentionLayer`; raises as `heads` does, and `InvalidValue` for an odd rotary size."""
        from attn_variants.mechanisms.recurrences.decay_layers import RetentionLayer

        own = self.Config.of(config)
        turned = None if own.base is None else Rotary(base=own.base, interleaved=True)
        return RetentionLayer(
            self.heads(config),
            width=config.width,
            bias=config.bias,
            chunk=own.chunk,
            rotary=config.rotary or turned,
            scale_base=own.scale_base,
        )

    def update_of(self, config: MechanismConfig) -> Update:
        """One rate a head, or with xPos one a channel."""
        return self.update if self.Config.of(config).scale_base is None else Update(decay="channel")

    def extras(self, config: MechanismConfig) -> Extra:
        """The gate."""
        heads = self.heads(config)
        return Extra(linear=config.width * heads.query * heads.value_size)

    def value_size(self, head_size: int) -> int:
        """Twice the head size."""
        return 2 * head_size
