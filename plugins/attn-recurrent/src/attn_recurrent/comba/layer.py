"""The layer of Comba."""

from __future__ import annotations

from functools import partial

import torch
from attn_core.masking import wide
from torch import Tensor, nn

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig
from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.gated_deltanet.rule import one_chunk, weights


class CombaLayer(GatedDeltaLayer):
    """Comba (Hu et al. 2025, arXiv 2506.02475).

    Learned besides the parameters of Gated DeltaNet: `feedback` b and `correction` D, both [key_heads].
    """

    gating = staticmethod(torch.sigmoid)
    one_chunk = staticmethod(partial(one_chunk, before=True))
    effective = staticmethod(partial(weights, before=True))

    def __init__(self, config: GatedDeltaConfig, correction: float) -> None:
        super().__init__(config)
        self.feedback = nn.Parameter(torch.ones(config.sizes.key_heads))
        self.correction = nn.Parameter(torch.full((config.sizes.key_heads,), float(correction)))

    def _asked(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries less a part of their keys, and keys, [batch, key_heads, tokens, key], before they are normalised."""
        query, key = super()._asked(query, key)
        return query - (wide(self.correction) * wide(self.feedback).sigmoid())[:, None, None] * key, key
