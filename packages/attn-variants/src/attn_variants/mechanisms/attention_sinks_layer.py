"""The layer of attention sinks (Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields
from attn_core.masking import positions
from torch import Tensor

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.attention.layer import SpecLayer
from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_of, rotate


class AttentionSinksLayer(SpecLayer):
    """Attention to the first `sinks` tokens and the last `window`, with rotary positions relative to the cache.

    The distance from a query to a sink is measured within the cache, which holds only the sinks and the window (Xiao et
    al. 2023, section 3.2).
    """

    only_spec = False
    own_positions = True

    def __init__(
        self, spec: AttentionSpec, *, sinks: int, window: int, hidden_size: int, bias: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(spec, hidden_size=hidden_size, bias=bias, dropout=dropout)
        self.sinks = sinks
        self.window = window

    def use_kernel(self, name: str | None) -> None:
        """See `SpecLayer.use_kernel`; with a rotary embedding, kernels get queries and keys of twice the head size."""
        super().use_kernel(name)
        self._paged = None  # positions within the cache are computed over gathered rows
        if self.spec.rotary is not None:
            heads = dataclasses.replace(self.spec.heads, key_size=2 * self.spec.heads.key_size)
            self.kernels = AttentionKernels(dataclasses.replace(self.spec, heads=heads, rotary=None), name)
            self._last_kernels = AttentionKernels(self.kernels.spec, name)

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        return attention_weights(self.spec, self.in_cache(self._operands(query, source, key_padding_mask, shared_kv)))

    def in_cache(self, operands: AttentionInputs) -> AttentionInputs:
        """The operands with rotary positions counted within the cache; unchanged without a rotary embedding.

        Queries contain both rotations, one for keys in the window and one for sinks, side by side; each key fills only
        the half that applies to it and is zero in the other. So heads are twice as wide, and scores are dot products.
        """
        if self.spec.rotary is None:
            return operands
        query_positions, key_positions = positions(operands)
        back = (self.sinks + self.window - 1 - query_positions).clamp(max=0)
        query = operands.query
        turned = rotate(query, self.further_turns(back, query), interleaved=self.spec.rotary.interleaved)
        sink = (key_positions < self.sinks)[:, :, None, None]
        key = torch.cat([operands.key.masked_fill(sink, 0.0), operands.key.masked_fill(~sink, 0.0)], dim=-1)
        return dataclasses.replace(operands, query=torch.cat([query, turned], dim=-1), key=key)

    def further_turns(self, places: Tensor, like: Tensor) -> CosSin:
        """Cosines and sines that rotate already rotated, and scaled, rows by further `places` [batch or 1, query]."""
        rotary = self.spec.rotary
        if rotary is None:
            raise TypeError("this layer has no rotary positions")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        found = cos_sin_of(rotary, self.rotated, places, dtype)
        return CosSin(found.cosines / rotary.attention_factor, found.sines / rotary.attention_factor)

    def _attend(self, rows: Tensor, operands: AttentionInputs, kernels: AttentionKernels) -> Tensor:
        return super()._attend(rows, self.in_cache(operands), kernels)
