"""Gated linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import MechanismConfig, Paper
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.recurrences.recurrence import Extra, Recurrence, RecurrenceConfig, Update


class GatedLinearAttention(Recurrence):
    """Every channel of the keys fades at a rate that depends on the token, from a gate of low rank.

    Keys are half as wide as values, as in the paper.
    """

    name = "gla"
    summary = "linear attention whose channels fade as each token says"
    paper = Paper(
        title="Gated Linear Attention Transformers with Hardware-Efficient Training",
        authors="Yang et al.",
        year=2023,
        arxiv="2312.06635",
    )
    equation = (
        r"S_t = \mathrm{diag}(\alpha_t) S_{t-1} + k_t v_t^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad"
        r" \alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau},\quad"
        r" y_t = W_O\left(\mathrm{swish}(W_R x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="channel")

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`rank` of the gate that decides what fades; a higher `temperature` τ lets everything fade more slowly."""

        rank: int = 16
        temperature: float = 16.0

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("rank", self.rank, "units")
            if not self.temperature > 0:
                raise InvalidValue.of("temperature", self.temperature, "a number above 0")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `GatedLinearLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.recurrences.decay_layers import GatedLinearLayer

        own = self.Config.of(config)
        return GatedLinearLayer(
            self.heads(config),
            width=config.width,
            bias=config.bias,
            chunk=own.chunk,
            rank=own.rank,
            temperature=own.temperature,
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The low-rank gate of the memory with its bias, the gate of the output and the norm."""
        heads, rank = self.heads(config), self.Config.of(config).rank
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        return Extra(linear=rank * (config.width + into) + config.width * out, other=into + heads.value_size)

    def key_size(self, head_size: int) -> int:
        """Half the head size."""
        return max(1, head_size // 2)
