"""The layer of attention sinks (Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, LayerState, RaggedBatch
from attn_core.batch import PagedView, Rows, SlotView
from attn_core.masking import positions
from torch import Tensor

from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_of, rotate
from attn_variants.plan import KernelPlan
from attn_variants.spec_layer import SpecLayer
from attn_variants.stepping import attend_ragged


class SinkView:
    """A `PagedView` whose rows are the first `count` of a sequence, from a slot, and those of a window.

    The slot has fields [requests, count, ...] by the names of the window's.
    """

    def __init__(self, batch: RaggedBatch, recent: PagedView, first: SlotView, count: int) -> None:
        self.batch = batch
        self.recent = recent
        self.count = count
        self._slot = first
        self._first = first.read()

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows [tokens, ...] in the window, and those at the first positions in the slot."""
        shown = self.recent.append(fields)
        early = self.batch.positions < self.count
        if not bool(early.any()):
            return shown
        places = self.batch.request_of[early], self.batch.positions[early]
        self._first = {
            name: held.index_put(places, fields[name][early].to(held.dtype)) for name, held in self._first.items()
        }
        self._slot.write(self._first)
        whole = early[:, None, None]
        return {name: torch.where(whole, fields[name].to(rows.dtype), rows) for name, rows in shown.items()}

    def rows(self, requests: Sequence[int]) -> Rows:
        """The first rows of these requests, then those in the window that are not among them."""
        recent = self.recent.rows(requests)
        chosen = torch.tensor(list(requests), device=recent.positions.device)
        ends = torch.tensor([self.batch.contexts[r] + self.batch.lengths[r] for r in requests], device=chosen.device)
        places = torch.arange(self.count, device=chosen.device).expand(len(chosen), -1)
        later = recent.positions >= self.count
        later = later if recent.key_padding_mask is None else later & recent.key_padding_mask
        key_padding_mask = torch.cat([places < ends[:, None], later], dim=1)
        fields = {
            name: torch.cat([self._first[name][chosen].to(rows.dtype), rows], dim=1)
            for name, rows in recent.fields.items()
        }
        return Rows(fields, torch.cat([places, recent.positions], dim=1), key_padding_mask)


class AttentionSinksLayer(SpecLayer):
    """Attention to the first `sinks` tokens and the last `window`, with rotary positions relative to the cache.

    The distance of a query to a sink is that within the cache, which holds the sinks and the window only (Xiao et al.
    2023, section 3.2).
    """

    def __init__(
        self, spec: AttentionSpec, *, sinks: int, window: int, hidden_size: int, bias: bool, dropout: float = 0.0
    ) -> None:
        super().__init__(spec, hidden_size=hidden_size, bias=bias, dropout=dropout)
        self.sinks = sinks
        self.window = window

    def use_kernel(self, name: str | None) -> None:
        """As of `SpecLayer`; kernels are given queries and keys of twice the size where positions turn."""
        super().use_kernel(name)
        if self.spec.rotary is not None:
            heads = dataclasses.replace(self.spec.heads, key_size=2 * self.spec.heads.key_size)
            self._plan = KernelPlan(dataclasses.replace(self.spec, heads=heads, rotary=None), name)
            self._last_plan = KernelPlan(self._plan.spec, name)

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return attention_weights(self.spec, self.in_cache(self._operands(query, source, key_padding_mask, shared_kv)))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, hidden_size] of many requests; returns [tokens, hidden_size]."""
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
        """The rotation by so many positions [batch or 1, query] of rows that are turned, and scaled, already."""
        rotary = self.spec.rotary
        if rotary is None:
            raise TypeError("positions turn nothing here")
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        found = cos_sin_of(rotary, self.rotated, places, dtype)
        return CosSin(found.cosines / rotary.attention_factor, found.sines / rotary.attention_factor)

    def _attend(self, rows: Tensor, operands: AttentionInputs, plan: KernelPlan) -> Tensor:
        return super()._attend(rows, self.in_cache(operands), plan)
