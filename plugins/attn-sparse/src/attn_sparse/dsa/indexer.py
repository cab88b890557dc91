"""The lightning indexer, which scores the past tokens of each query, and the loss that trains it."""

from __future__ import annotations

from functools import lru_cache

import torch
from attn_core import Rotary
from attn_core.masking import wide
from torch import Tensor, nn

from attn_sparse.dsa.options import DsaConfig

SHORTEST = 512
"""The least number of positions whose angles are kept."""
FAR = 1 << 17
"""The position from which on they are not, as the table would be large."""


def turn(rows: Tensor, positions: Tensor, rotary: Rotary, turned: int, *, interleaved: bool = False) -> Tensor:
    """Apply rotary positions [batch or 1, token] to the first `turned` elements of `rows` [batch, token, heads, size].

    Element i is paired with element i + turned / 2, as in the indexer of DeepSeek-V3.2, or with its neighbour if
    `interleaved`, even if the attention's own keys use another pairing.
    """
    looked_up = rows.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling()
    if looked_up and int(positions.min()) >= 0 and int(positions.max()) < FAR:
        # Frequencies and angles, anew at every step, would take longer than turning.
        length = max(SHORTEST, 1 << int(positions.max()).bit_length())
        table = first_turns(rotary, turned, length, rows.dtype)
        found = [part.index_select(0, positions.flatten()).view(*positions.shape, 1, -1) for part in table]
    else:
        found = [part[..., None, :] for part in turns(rotary, turned, positions, rows.dtype)]
    cosines, sines = found
    part = rows[..., :turned]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    pair = first * cosines - second * sines, second * cosines + first * sines
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([rotated, rows[..., turned:]], dim=-1)


def turns(rotary: Rotary, turned: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., turned / 2] of the angles at `positions` [...], times the rotary positions' factor."""
    frequencies = torch.tensor(rotary.frequencies(turned), dtype=torch.float64, device=positions.device)
    angles, factor = positions.to(torch.float64)[..., None] * frequencies, rotary.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@lru_cache(maxsize=16)
def first_turns(rotary: Rotary, turned: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The `turns` of the first positions, on the CPU, computed once."""
    with torch.inference_mode(mode=False):
        return turns(rotary, turned, torch.arange(length, device="cpu"), dtype)


EPSILON = 1e-6


class Indexer(nn.Module):
    """I = Σ_j w_j ReLU(q_j · k / √size) / √heads over a few small heads that share one normalised key per token.

    Learned: `query`, `key` and `weight` (`nn.Linear` without bias) and `norm` (`nn.LayerNorm`). Inputs are detached: no
    gradient flows to them. Index queries are computed from rows of `query_width` elements.
    """

    def __init__(self, options: DsaConfig) -> None:
        super().__init__()
        self.options = options
        heads, size = options.index_heads, options.index_size
        self.query = nn.Linear(options.query_width, heads * size, bias=False)
        self.key = nn.Linear(options.hidden_size, size, bias=False)
        self.norm: nn.Module = nn.LayerNorm(size, eps=EPSILON)
        self.weight = nn.Linear(options.hidden_size, heads, bias=False)
        self.scale: float = (size * heads) ** -0.5

    def keys(self, rows: Tensor) -> Tensor:
        """Index keys [..., size] of hidden states [..., hidden_size], before rotary positions are applied."""
        keys: Tensor = self.norm(self.key(rows.detach()))
        return keys

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Index queries [batch, query, heads, size] of rows [batch, query, query_width], with rotary positions, at
        least float32."""
        query = torch.unflatten(wide(self.query(rows.detach())), -1, (self.options.index_heads, -1))
        return self._turned(query, positions)

    def remembered(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The index keys [..., key, size] that are cached for hidden states [..., key, hidden_size] at `positions`
        [key], or [batch, key] as the hidden states: with rotary positions."""
        batched = rows if rows.dim() == 3 else rows[None]
        keys = self.turned_keys(self.keys(batched), positions if positions.dim() == 2 else positions[None])
        return keys.to(rows.dtype).view(*rows.shape[:-1], keys.shape[-1])

    def turned_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Index keys [batch, key, size] with rotary positions [batch or 1, key] applied, at least float32."""
        return self._turned(wide(keys)[:, :, None], positions)[:, :, 0]

    def weights(self, rows: Tensor) -> Tensor:
        """The weights of index heads [batch, query, heads], at least float32, times 1 / √(size · heads)."""
        return wide(self.weight(rows.detach())) * self.scale

    def _turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        turned = self.options.turned
        if self.options.rotary is None or turned == 0:
            return rows
        return turn(rows, positions, self.options.rotary, turned, interleaved=self.options.index_interleaved)


def index_scores(query: Tensor, weights: Tensor, key: Tensor) -> Tensor:
    """The index scores I [batch, query, key].

    They are computed from index queries [batch, query, heads, size], head weights [batch, query, heads] and index keys
    [batch, key, size].
    """
    if query.shape[1] == 1:
        # With few rows, products are faster where the keys are the rows.
        return (torch.relu(key @ query[:, 0].transpose(1, 2)) @ weights.transpose(1, 2)).transpose(1, 2)
    products = torch.relu(query.flatten(1, 2) @ key.transpose(1, 2))
    per_head = torch.unflatten(products, 1, query.shape[1:3])
    scores: Tensor = (weights[:, :, None] @ per_head)[:, :, 0]
    return scores


def divergence(scores: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """KL(p ‖ softmax(I)) over the chosen keys, [batch, query], 0 for queries without any (equation 4 of the paper).

    `scores` are I [batch, query, key]; p is the mean over heads of the attention's `weights` [batch, heads, query,
    key], which get no gradient.
    """
    target = weights.detach().mean(1)
    lowest = torch.finfo(scores.dtype).min / 2
    logs = scores.masked_fill(~chosen, lowest).log_softmax(-1)
    found: Tensor = (torch.xlogy(target, target) - target * logs.masked_fill(~chosen, 0.0)).sum(-1)
    return found
