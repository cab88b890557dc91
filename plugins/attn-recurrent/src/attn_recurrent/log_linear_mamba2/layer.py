"""The layer of log-linear Mamba-2."""

from __future__ import annotations

import torch
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import softplus

from attn_recurrent.log_linear_mamba2.config import LogLinearConfig
from attn_recurrent.log_linear_mamba2.levels import Leveled, one_chunk, weights
from attn_recurrent.mamba2.layer import Mamba2Layer


class LogLinearMamba2Layer(Mamba2Layer):
    """Mamba-2 with a weight for each level of the past.

    Learned as in Mamba-2, where `input` also has the weights [heads · levels], after step sizes; besides, `levels`
    [heads, levels], by which they are multiplied before softplus.
    """

    one_chunk = staticmethod(one_chunk)
    effective = staticmethod(weights)

    def __init__(self, config: LogLinearConfig) -> None:
        super().__init__(config)
        self.levels = nn.Parameter(torch.ones(config.num_heads, config.levels))

    def _system(self, mixed: Tensor, step: Tensor, further: Tensor, first: Tensor | None) -> tuple[Leveled, Tensor]:
        system, value = super()._system(mixed, step, further, first)
        scale = softplus(torch.unflatten(further, -1, self.levels.shape) * wide(self.levels)).transpose(1, 2)
        place = torch.arange(mixed.shape[1], device=mixed.device)[None]
        place = place.expand(len(mixed), -1) if first is None else first + place
        return Leveled._make([*system, scale, place[:, None, :, None]]), value
