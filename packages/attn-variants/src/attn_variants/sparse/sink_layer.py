"""The layer of attention sinks."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, LayerState, RaggedBatch
from attn_core.masking import positions
from torch import Tensor

from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_of, rotate
from attn_variants.plan import KernelPlan
from attn_variants.sparse.sink_view import SinkView
from attn_variants.spec_layer import SpecLayer
from attn_variants.stepping import attend_ragged


class SinkLayer(SpecLayer):
    """Attention to the first `sinks` tokens and the last `window`, where rotary positions count places in the cache.

    A query far from the start meets the sinks as if only the window lay between them, as it does in a cache that holds
    nothing else (Xiao et al. 2023, section 3.2).
    """

    def __init__(
        self, spec: AttentionSpec, *, sinks: int, window: int, width: int, bias: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(spec, width=width, bias=bias, dropout=dropout)
        self.sinks = sinks
        self.window = window

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return attention_weights(self.spec, self.in_cache(self._operands(query, source, key_padding_mask, borrowed)))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width]."""
        seen = SinkView(batch, state["recent"], state["sinks"], self.sinks)
        out = attend_ragged(self, query, batch, {"kv": seen})
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def in_cache(self, operands: AttentionInputs) -> AttentionInputs:
        """The operands with positions counted in the cache, where positions turn anything.

        Queries carry both turns, for keys of the window and for sinks, and each key the one half that it meets; so both
        become twice as wide, and the scores are still products.
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
        """The turns by so many places [batch or 1, query] of rows that are turned, and scaled, already."""
        rotary = self.spec.rotary
        if rotary is None:
            raise TypeError("positions turn nothing here")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        found = cos_sin_of(rotary, self.rotated, places, dtype)
        return CosSin(found.cosines / rotary.attention_factor, found.sines / rotary.attention_factor)

    def _attend(self, rows: Tensor, operands: AttentionInputs, plan: KernelPlan) -> Tensor:
        return super()._attend(rows, self.in_cache(operands), plan)
