"""Reflections by the data as positions, between the projections and the output of a layer."""

from __future__ import annotations

from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention
from attn_core.masking import allowed_pairs, of_query_heads, positions, shares, wide
from torch import Tensor, nn

from attn_variants.mechanisms.layer_utils import by_heads, fresh_linear, unit
from attn_variants.mechanisms.recurrences.recurrence_layer import ShortConvolution
from attn_variants.places.blockwise import path_attention
from attn_variants.places.householder import Paths, path_scores


class Reflections(InnerAttention, nn.Module):
    """Softmax attention in which a query is reflected by every token between it and the key.

    Learned: `down` and `up`, the directions through `rank` elements, `convolution` of their last `taps` tokens, and
    `strength` (`nn.Linear`, its bias zero), half of whose reach is a reflection. `block` tokens go as one.
    """

    def __init__(self, spec: AttentionSpec, *, width: int, rank: int, taps: int, block: int) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = spec
        self.block = block
        self.down = fresh_linear(width, rank, bias=False)
        self.up = fresh_linear(rank, heads.key_value * heads.key_size, bias=False)
        self.convolution = ShortConvolution(heads.key_value * heads.key_size, taps)
        self.strength = fresh_linear(width, heads.key_value, bias=True)

    def remember(self, rows: Tensor) -> Fields:
        """Of rows [..., width]: "direction" [..., key_value_heads, key_size], not yet convolved, and "strength" β
        [..., key_value_heads], from 0 to 2, at least float32."""
        direction = by_heads(self.up(self.down(rows)), self.spec.heads.key_value)
        return {"direction": direction, "strength": 2 * wide(self.strength(rows)).sigmoid()}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        has_positions = operands.query_positions is not None or operands.key_positions is not None
        if not has_positions and operands.query.shape[1] == operands.key.shape[1]:
            return self.whole(operands)
        value = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2))
        out = self.weights(rows, operands, attend) @ value
        return out.transpose(1, 2).to(operands.value.dtype)

    def whole(self, operands: AttentionInputs) -> Tensor:
        """The outputs of whole sequences, without the scores of all pairs in memory."""
        query, key, value = (wide(part).transpose(1, 2) for part in (operands.query, operands.key, operands.value))
        scaled = query * self.spec.heads.key_size**-0.5, key, value
        block = min(self.block, max(1, key.shape[2]))
        out = path_attention(self.spec.heads, scaled, self.paths(operands), operands.key_padding_mask, block)
        return out.transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Weights [batch, heads, query, key]."""
        heads = self.spec.heads
        query = wide(operands.query).transpose(1, 2) * heads.key_size**-0.5
        key = wide(operands.key).transpose(1, 2)
        block = min(self.block, max(1, key.shape[2]))
        scores = path_scores(heads, query, key, self.paths(operands), positions(operands)[0], block)
        return shares(scores, allowed_pairs(self.spec.mask, operands))

    def paths(self, operands: AttentionInputs) -> Paths:
        """The reflections of all remembered tokens, which stand at positions 0, 1, ...; padding reflects nothing."""
        direction, strength = wide(operands.fields["direction"]), wide(operands.fields["strength"])
        if operands.key_padding_mask is not None:
            direction = direction.masked_fill(~operands.key_padding_mask[:, :, None, None], 0.0)
            strength = strength.masked_fill(~operands.key_padding_mask[:, :, None], 0.0)
        convolved = self.convolution(direction.flatten(-2), None)[0]
        turned = unit(by_heads(convolved, self.spec.heads.key_value))
        return Paths(turned.transpose(1, 2), strength.to(turned.dtype).transpose(1, 2))
