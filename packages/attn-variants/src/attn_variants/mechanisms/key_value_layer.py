"""The layer of key-value attention."""

from __future__ import annotations

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.masking import counted, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_variants.attention.projections import glorot_parameter, refuse_source


class KeyValueLayer(nn.Module):
    """Additive attention of each token to the `window` tokens before it, with hidden states split by use.

    A hidden state is split into a key and a value and, with `parts` 3, a prediction part. The output combines the
    weighted sum of values with the token's own value or, if there is one, its prediction part. Learned: `split` and
    `output` (`nn.Linear`) and, per head, `of_past` W_Y, `of_own` W_h, `of_read` W_r, `of_last` W_x [heads, size, size]
    and `vector` w [heads, size].
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, window: int, parts: int) -> None:
        super().__init__()
        count, size = heads.query, heads.key_size
        self.heads, self.size, self.window = count, size, window
        self.split = nn.Linear(hidden_size, parts * count * size, bias=bias)
        self.of_past = glorot_parameter(count, size, size)
        self.of_own = glorot_parameter(count, size, size)
        self.of_read = glorot_parameter(count, size, size)
        self.of_last = glorot_parameter(count, size, size)
        self.vector = glorot_parameter(count, size)
        self.output = nn.Linear(count * size, hidden_size, bias=bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, token, hidden_size] -> [batch, token, hidden_size].

        `key_padding_mask` [batch, token], bool, True where a token is real; padding tokens feed zeros to the output.
        """
        refuse_source(source)
        if query.shape[1] == 0:
            return query.clone()
        key, value, last = self._parts(query)
        near = windows(self._of_heads(key, self.of_past), self.window).transpose(2, 3)
        scores = self._scores(self._of_heads(key, self.of_own)[:, :, :, None], near)
        # Places before the first token are padding.
        real = key.new_ones(key.shape[:2]) if key_padding_mask is None else key_padding_mask.to(key.dtype)
        allowed = windows(real[:, :, None], self.window)[..., 0] > 0
        read = shares(scores, allowed[:, :, None])[:, :, :, None] @ windows(value, self.window).transpose(2, 3)
        return self._out(read[:, :, :, 0], last, query, key_padding_mask)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, token, token]; all zero for a token with no previous token."""
        refuse_source(source)
        key, _, _ = self._parts(query)
        places = counted(query)
        near = self._near(places, places, key_padding_mask)
        return self._attention_weights(key, self._of_heads(key, self.of_past), near).transpose(1, 2)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Extends the state "kv".
        """
        key, value, last = self._parts(query)
        past = self._of_heads(key, self.of_past)
        state["kv"].append({"key": past.to(query.dtype), "value": value.to(query.dtype)})
        if batch.decoding:
            spans = [(slice(None), list(range(batch.requests)))]
        else:
            spans = [(slice(span.start, span.stop), [span.request]) for span in batch.spans()]
        out = []
        for piece, requests in spans:
            held = state["kv"].rows(requests)
            own = key[piece].reshape(len(requests), -1, self.heads, self.size)
            places = batch.positions[piece].reshape(len(requests), -1)
            allowed = self._near(places, held.positions, held.key_padding_mask)
            weights = self._attention_weights(own, wide(held.fields["key"]), allowed).transpose(1, 2)
            read = weights @ wide(held.fields["value"]).transpose(1, 2)
            out.append(read.transpose(1, 2).flatten(0, 1))
        return self._out(torch.cat(out), last, query, None)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and last part (for the output) [..., heads, size] of rows [..., hidden_size], at least float32."""
        parts = torch.unflatten(wide(self.split(rows)), -1, (-1, self.heads, self.size)).unbind(-3)
        return parts[0], parts[1], parts[-1]

    def _near(self, places: Tensor, keys: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Bool [batch or 1, query, key], True for keys at positions `keys` that are real and within the window."""
        back = places[:, :, None] - keys[:, None]
        near = (back > 0) & (back <= self.window)
        return near if key_padding_mask is None else near & key_padding_mask[:, None]

    def _attention_weights(self, own: Tensor, past: Tensor, allowed: Tensor) -> Tensor:
        """Weights [batch, query, heads, key] of own keys [batch, query, heads, size] over projected earlier keys W_Y k
        [batch, key, heads, size]."""
        scores = self._scores(self._of_heads(own, self.of_own)[:, :, :, None], past.transpose(1, 2)[:, None])
        return shares(scores, allowed[:, :, None])

    def _scores(self, own: Tensor, past: Tensor) -> Tensor:
        """wᵀ tanh(own + past), for [batch, query, heads, 1, size] and [batch, query or 1, heads, key, size]."""
        hidden = torch.tanh(own + past)
        return (hidden @ self.vector.to(hidden.dtype)[:, :, None])[..., 0]

    def _of_heads(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows [..., heads, size] by a matrix per head, `weight` [heads, size, size]."""
        return (rows[..., None, :] @ weight.to(rows.dtype))[..., 0, :]

    def _out(self, read: Tensor, last: Tensor, inputs: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        rows = torch.tanh(self._of_heads(read, self.of_read) + self._of_heads(last, self.of_last))
        rows = rows.flatten(-2).to(inputs.dtype)
        out: Tensor = self.output(rows if key_padding_mask is None else rows * key_padding_mask[..., None])
        return out


def windows(rows: Tensor, length: int) -> Tensor:
    """The `length` rows before each token, [batch, token, length, ...], of rows [batch, token, ...]; zero-padded."""
    padded = pad(rows, (0, 0) * (rows.dim() - 2) + (length, 0))[:, :-1]
    return padded.unfold(1, length, 1).movedim(-1, 2)
