"""The layer of the gated short convolution."""

from __future__ import annotations

import torch
from attn_core import LayerState, RaggedBatch
from torch import Tensor, nn

from attn_recurrent.sequences import filtered, pieces, refuse_source


class ShortConvLayer(nn.Module):
    """A gated short convolution over inputs of `hidden_size` (Liquid AI 2025, arXiv 2511.23404).

    Learned: `input` (`nn.Linear` to the gate before the convolution, the gate after it, and the values, in this
    order), `filters` [hidden_size, taps], with the newest token last, `filter_bias` [hidden_size] if there are biases,
    and `output` (`nn.Linear`).
    """

    def __init__(self, hidden_size: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.input = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.filters = nn.Parameter(torch.empty(hidden_size, taps).uniform_(-(taps**-0.5), taps**-0.5))
        self.filter_bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.output = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, is True for real tokens. Raises `InvalidValue` if a source is given.
        """
        refuse_source(source, "short_conv")
        return self._mix(query, key_padding_mask, None)[0]

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Reads and replaces the state "memory": "tail" [requests, taps - 1, hidden_size].
        """
        tail = state["memory"].read()["tail"]
        mixed = [self._mix(rows, None, tail[requests]) for rows, requests in pieces(query, batch)]
        state["memory"].write({"tail": torch.cat([left for _, left in mixed]).to(tail.dtype)})
        return torch.cat([out.flatten(0, 1) for out, _ in mixed])

    def _mix(self, rows: Tensor, key_padding_mask: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [batch, tokens, hidden_size], and the last inputs of the convolution."""
        before, after, value = self.input(rows).chunk(3, dim=-1)
        entering = before * value
        if key_padding_mask is not None:
            entering = torch.where(key_padding_mask[..., None], entering, 0)
        convolved, tail = filtered(entering, self.filters, self.filter_bias, tail)
        if key_padding_mask is not None:
            # A filter's bias would be seen where there is nothing to read.
            convolved = torch.where(key_padding_mask[..., None], convolved, 0)
        out: Tensor = self.output(after * convolved.to(after.dtype))
        return out, tail
