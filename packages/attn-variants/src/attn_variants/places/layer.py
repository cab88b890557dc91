"""Layers whose queries, keys and values are each given their position before they meet."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import torch
from attn_core import AttentionInputs, Fields
from attn_core.masking import positions as positions_of
from torch import Tensor

from attn_variants.places.sinusoids import sinusoidal_at
from attn_variants.spec_layer import SpecLayer


class PlacedLayer(SpecLayer):
    """Sinusoids of the size of a head for queries, keys and values, the same in every head.

    Keys and values are remembered, and lent, without positions.
    """

    def use_kernel(self, name: str | None) -> None:
        """As of any spec, over gathered rows: kernels that reach rows where they lie would meet them unplaced."""
        super().use_kernel(name)
        self._paged = None
        self.last_needs_positions = True

    def operands(
        self,
        query: Tensor,
        fields: Fields,
        key_padding_mask: Tensor | None = None,
        positions: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> AttentionInputs:
        """AttentionInputs of queries and fields without positions, with them; arguments as of `SpecLayer.operands`."""
        plain = super().operands(query, fields, key_padding_mask, positions)
        at_query, at_key = positions_of(plain)
        key = self._placed(plain.key, at_key)
        return dataclasses.replace(
            plain, query=self._placed(plain.query, at_query), key=key, value=self._placed(plain.value, at_key)
        )

    @abstractmethod
    def place(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Rows [batch, row, heads, size] that have these vectors [batch or 1, row, 1, size]."""

    def _placed(self, rows: Tensor, at: Tensor) -> Tensor:
        return self.place(rows, sinusoidal_at(at, rows.shape[-1], rows)[:, :, None])


class AddedPlaces(PlacedLayer):
    """Positions are added: q + p, k + p, v + p."""

    def place(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """The sums."""
        return rows + vectors


class ConcatenatedPlaces(PlacedLayer):
    """Positions stand behind: [q; p], [k; p], [v; p], twice as long as what is projected."""

    def place(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Both, [batch, row, heads, 2 size]."""
        return torch.cat([rows, vectors.expand_as(rows)], dim=-1)
