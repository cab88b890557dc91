"""General scores qᵀ W k."""

from __future__ import annotations

import torch
from attn_core import Heads
from torch import Tensor, nn


class GeneralParameters(nn.Module):
    """W [heads, key_size, key_size], uniform in ±0.1 as in the code of Luong et al. 2015."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.weight = nn.Parameter(self._draw(heads))

    @staticmethod
    def _draw(heads: Heads) -> Tensor:
        return (torch.rand(heads.query, heads.key_size, heads.key_size) * 2 - 1) * 0.1
