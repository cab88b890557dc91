"""The layer of Comba."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from attn_core.masking import wide
from torch import Tensor, nn

from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.gated_deltanet.rule import Rule, one_chunk, weights
from attn_recurrent.sequences import in_chunks

if TYPE_CHECKING:
    from attn_recurrent.comba import CombaConfig


class CombaLayer(GatedDeltaLayer):
    """Comba (Hu et al. 2025, arXiv 2506.02475).

    Learned besides the parameters of Gated DeltaNet: `feedback` b and `correction` D, both [key_heads].
    """

    gating = staticmethod(torch.sigmoid)
    chunked = staticmethod(partial(in_chunks, partial(one_chunk, before=True)))
    effective = staticmethod(partial(weights, before=True))

    def __init__(self, config: CombaConfig) -> None:
        super().__init__(config)
        self.feedback = nn.Parameter(torch.ones(config.sizes.key_heads))
        self.correction = nn.Parameter(torch.full((config.sizes.key_heads,), float(config.correction)))

    def _asked(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries less a part of their keys, and keys, [batch, key_heads, tokens, key], before they are normalised."""
        query, key = super()._asked(query, key)
        return query - (wide(self.correction) * wide(self.feedback).sigmoid())[:, None, None] * key, key

    def _read(self, rule: Rule, memory: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- for kernels
        return self.chunked(rule, memory, self.chunk)
