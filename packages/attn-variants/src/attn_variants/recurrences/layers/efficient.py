"""The layer of efficient attention."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.errors import InvalidValue
from attn_core.masking import wide
from torch import Tensor, nn

from attn_variants.recurrences.numbers import by_heads, fresh_linear


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

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `keep` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is given.
        """
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None: efficient attention is over one sequence")
        channels, tokens = self._shares(query, keep)
        value = wide(self._heads(self.value(query)))
        context = torch.matmul(tokens.transpose(-1, -2), value)
        out = torch.matmul(channels, context).transpose(1, 2)
        projected: Tensor = self.output(out.flatten(-2).to(query.dtype))
        return projected

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads; never made to attend."""
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None: efficient attention is over one sequence")
        channels, tokens = self._shares(query, keep)
        return torch.matmul(channels, tokens.transpose(-1, -2))

    def _shares(self, rows: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Shares of the channels in each query, and of the tokens in each channel, [batch, heads, tokens, key_size]."""
        channels = wide(self._heads(self.query(rows))).softmax(-1)
        key = wide(self._heads(self.key(rows)))
        if keep is None:
            return channels, key.softmax(-2)
        real = keep[:, None, :, None]
        # Where no token is real, the scores are left as they are, so that nothing becomes no number.
        shares = torch.where(real | ~real.any(-2, keepdim=True), key, -torch.inf).softmax(-2)
        return channels, torch.where(real, shares, 0)

    def _heads(self, rows: Tensor) -> Tensor:
        return by_heads(rows, self.heads.query).transpose(1, 2)
