"""The layer of graph attention (Veličković et al. 2018, arXiv 1710.10903, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import MechanismConfig
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from attn_variants.attention.projections import refuse_source
from attn_variants.compute.distribution import softmax_over


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """The options of a `GraphLayer`: the heads of `config`, of `size` elements, joined by `merge`, "concat" or "mean".

    `edges` are pairs (from, to) of positions, None for all pairs; `self_loops` make every position its own
    neighbour. `slope` is that of LeakyReLU below zero.
    """

    config: MechanismConfig
    size: int
    merge: str
    edges: tuple[tuple[int, int], ...] | None
    self_loops: bool
    slope: float


class GraphLayer(nn.Module):
    """Attention with the softmax of LeakyReLU(a · [W x_i, W x_j]) over each token's neighbours.

    Learned: `value` W (`nn.Linear`, Glorot-uniform), `target` and `source` [heads, size], the two halves of a, and,
    with a bias, `bias` [hidden_size]. Time and memory grow with the number of edges or, for all pairs, with the square
    of the length.
    """

    def __init__(self, shape: GraphShape) -> None:
        super().__init__()
        self.shape = shape
        self.value = nn.Linear(shape.config.hidden_size, shape.config.num_heads * shape.size, bias=False)
        self.target = nn.Parameter(torch.empty(shape.config.num_heads, shape.size))
        self.source = nn.Parameter(torch.empty(shape.config.num_heads, shape.size))
        self.bias = nn.Parameter(torch.zeros(shape.config.hidden_size)) if shape.config.bias else None
        for weight in (self.value.weight, self.target, self.source):
            nn.init.xavier_uniform_(weight)
        self.edges: Tensor | None
        listed = None if shape.edges is None else torch.tensor(listed_edges(shape), device="cpu").reshape(-1, 2).T
        self.register_buffer("edges", listed, persistent=False)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        rows, scores = self._rows(query, source)
        if self.edges is None:
            out = torch.matmul(self._all_pairs(scores, key_padding_mask), rows.transpose(1, 2)).transpose(1, 2)
        else:
            from_, to, weights = self._along_edges(scores, key_padding_mask)
            moved = rows[:, from_] * weights.transpose(1, 2)[..., None]
            out = torch.zeros_like(rows).index_add(1, to, moved)
        merged = out.flatten(-2) if self.shape.merge == "concat" else out.mean(-2)
        return (merged if self.bias is None else merged + self.bias).to(query.dtype)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        _, scores = self._rows(query, source)
        if self.edges is None:
            return self._all_pairs(scores, key_padding_mask)
        from_, to, weights = self._along_edges(scores, key_padding_mask)
        batch, heads, tokens = weights.shape[0], weights.shape[1], query.shape[1]
        flat = torch.zeros(batch, heads, tokens * tokens, dtype=weights.dtype, device=weights.device)
        return flat.index_add(2, to * tokens + from_, weights).reshape(batch, heads, tokens, tokens)

    def _rows(self, query: Tensor, source: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """W x [batch, tokens, heads, size], and its score terms as target and as source [batch, heads, tokens]."""
        refuse_source(source)
        rows = wide(self.value(query).reshape(*query.shape[:-1], self.shape.config.num_heads, self.shape.size))
        target, own = ((rows * part).sum(-1).transpose(1, 2) for part in (self.target, self.source))
        return rows, (target, own)

    def _all_pairs(self, scores: tuple[Tensor, Tensor], key_padding_mask: Tensor | None) -> Tensor:
        """Attention weights [batch, heads, query, key] over all pairs."""
        energies = leaky_relu(scores[0][..., :, None] + scores[1][..., None, :], self.shape.slope)
        places = torch.arange(energies.shape[-1], device=energies.device)
        allowed = torch.ones_like(energies[:1, :1], dtype=torch.bool)
        if self.shape.config.causal:
            allowed = allowed & (places[:, None] >= places)
        if not self.shape.self_loops:
            allowed = allowed & (places[:, None] != places)
        return softmax_over(
            energies, allowed if key_padding_mask is None else allowed & key_padding_mask[:, None, None, :]
        )

    def _along_edges(
        self, scores: tuple[Tensor, Tensor], key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The positions where edges start and end, [edges] each, and their weights [batch, heads, edges].

        Edges to or from positions beyond the sequence are moved to position 0 and get weight zero.
        """
        tokens = scores[0].shape[-1]
        edges = self._edges(tokens)
        there = (edges < tokens).all(0)
        from_, to = edges * there
        real = there[None] if key_padding_mask is None else there & key_padding_mask[:, from_]
        energies = leaky_relu(scores[0][..., to] + scores[1][..., from_], self.shape.slope)
        energies = energies.masked_fill(~real[:, None], torch.finfo(energies.dtype).min)
        index = to.expand_as(energies)
        lowest = torch.full_like(scores[0], torch.finfo(energies.dtype).min)
        most = lowest.scatter_reduce(-1, index, energies.detach(), "amax")
        exponentials = torch.exp(energies - most.gather(-1, index)).masked_fill(~real[:, None], 0.0)
        sums = torch.zeros_like(scores[0]).scatter_add(-1, index, exponentials)
        tiny = torch.finfo(energies.dtype).tiny
        return from_, to, exponentials / sums.gather(-1, index).clamp(min=tiny)

    def _edges(self, tokens: int) -> Tensor:
        """The edges [2, edges], from and to, including self-loops of all `tokens` if the layer has them."""
        if self.edges is None:
            raise TypeError("a complete graph has no list of edges")
        if not self.shape.self_loops:
            return self.edges
        loops = torch.arange(tokens, device=self.edges.device)
        return torch.cat([self.edges, torch.stack([loops, loops])], dim=1)


def listed_edges(shape: GraphShape) -> list[tuple[int, int]]:
    """The distinct edges, without loops if self-loops are added to all tokens, and without later ones if causal."""
    edges = set(shape.edges or ())
    return sorted(
        (one, other)
        for one, other in edges
        if not (shape.self_loops and one == other) and not (shape.config.causal and one > other)
    )
