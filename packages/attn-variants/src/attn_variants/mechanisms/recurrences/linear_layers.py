"""Layers of linear attention and of efficient attention."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from attn_variants.mechanisms.layer_utils import by_heads, fresh_linear, refuse_source
from attn_variants.mechanisms.recurrences.recurrence_layer import Inputs, RecurrenceLayer

EPSILON = 1e-6
"""Added to every denominator, as in the code of Katharopoulos et al. 2020."""


def features(rows: Tensor) -> Tensor:
    """elu(x) + 1, in at least float32.

    Written as e^min(x, 0) + max(x, 0), which is positive for all x; 1 + (e^x - 1) is zero below -17 in float32.
    """
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    return torch.exp(wide.clamp(max=0)) + relu(wide)


def with_ones(values: Tensor, like: Tensor) -> Tensor:
    """Values in the type of `like`, with a last column of ones."""
    return pad(values.to(like.dtype), (0, 1), value=1.0)


def divided(sums: Tensor) -> Tensor:
    """Numerators [..., value_size + 1] by their last column, [..., value_size]; 0 where nothing was seen."""
    return sums[..., :-1] / (sums[..., -1:] + EPSILON)


def bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sums [batch, tokens, heads, value_size + 1]: every query sees every key."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    sums = torch.matmul(key.transpose(-1, -2), value)
    return torch.matmul(query, sums).transpose(1, 2)


class LinearAttentionLayer(RecurrenceLayer):
    """Linear attention over inputs of `width`; `chunk` tokens meet pair by pair.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, uniform by Glorot's rule, biases zero). Features and
    sums are at least float32, whatever the inputs are. The memory's last column is the paper's z.
    """

    def __init__(self, heads: Heads, *, width: int, causal: bool, bias: bool, chunk: int) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk)
        self.causal = causal

    def steps(self, inputs: Inputs) -> Steps:
        """Features of queries and keys, and values with a column of ones."""
        key = features(inputs.key)
        return Steps(features(inputs.query), key, with_ones(inputs.value, key))

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """Sums over all earlier tokens, or over all where the order is ignored."""
        return super().attend(steps, computed) if self.causal else bidirectional(*steps[:3])

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads, zero for padded keys."""
        steps, _ = self.read(query, source, key_padding_mask)
        pairs = steps.query.transpose(1, 2) @ steps.key.permute(0, 2, 3, 1)
        pairs = pairs.tril() if self.causal else pairs
        return pairs / (pairs.sum(-1, keepdim=True) + EPSILON)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Sums of values by sums of ones, projected."""
        return super().finish(divided(out), rows)


class EfficientLayer(nn.Module):
    """Efficient attention (Shen et al. 2018, arXiv 1812.01243, equation 4) over inputs of `width`.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`).
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        self.query = fresh_linear(width, into, bias=bias)
        self.key = fresh_linear(width, into, bias=bias)
        self.value = fresh_linear(width, out, bias=bias)
        self.output = fresh_linear(out, width, bias=bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is
        given.
        """
        refuse_source(source)
        channels, tokens = self._shares(query, key_padding_mask)
        value = wide(self._heads(self.value(query)))
        context = torch.matmul(tokens.transpose(-1, -2), value)
        out = torch.matmul(channels, context).transpose(1, 2)
        projected: Tensor = self.output(out.flatten(-2).to(query.dtype))
        return projected

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads; never made to attend."""
        refuse_source(source)
        channels, tokens = self._shares(query, key_padding_mask)
        return torch.matmul(channels, tokens.transpose(-1, -2))

    def _shares(self, rows: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Shares of the channels in each query, and of the tokens in each channel, [batch, heads, tokens, key_size]."""
        channels = wide(self._heads(self.query(rows))).softmax(-1)
        key = wide(self._heads(self.key(rows)))
        if key_padding_mask is None:
            return channels, key.softmax(-2)
        real = key_padding_mask[:, None, :, None]
        # Where no token is real, the scores are left as they are, so that nothing becomes no number.
        shares = torch.where(real | ~real.any(-2, keepdim=True), key, -torch.inf).softmax(-2)
        return channels, torch.where(real, shares, 0)

    def _heads(self, rows: Tensor) -> Tensor:
        return by_heads(rows, self.heads.query).transpose(1, 2)
