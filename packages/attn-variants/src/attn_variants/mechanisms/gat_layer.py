"""The layer of graph attention (Veličković et al. 2018, arXiv 1710.10903, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attn_core import MechanismConfig
from attn_core.errors import Incompatible, InvalidValue
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import dropout, leaky_relu

from attn_variants.attention.projections import refuse_source
from attn_variants.compute.distribution import softmax_over


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """The options of a `GraphLayer`: the heads of `config`, of `size` elements, joined by `merge`, "concat" or "mean".

    `edges` are pairs (from, to) of positions, None for all pairs; `self_loops` make every position its own
    neighbour. `slope` is that of LeakyReLU below zero. `dropout` is the probability with which weights are set to zero
    in training.
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

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        edges: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. `edges` are those of each example instead
        of the layer's, int64 [edges, 2] each: pairs (from, to) of its tokens. Raises `InvalidValue` if a source is
        given, and for edges of another shape, dtype or number, or to tokens that an example does not have.
        """
        rows, scores = self._rows(query, source)
        if edges is not None:
            united, joined, real = self._united(rows, scores, key_padding_mask)
            from_, to, weights = self._along_edges(joined, real, self._of_each(edges, query))
            moved = united[:, from_] * self._dropped(weights).transpose(1, 2)[..., None]
            out = torch.zeros_like(united).index_add(1, to, moved).reshape(rows.shape)
        elif self.edges is None:
            weights = self._dropped(self._all_pairs(scores, key_padding_mask))
            out = torch.matmul(weights, rows.transpose(1, 2)).transpose(1, 2)
        else:
            from_, to, weights = self._along_edges(scores, key_padding_mask, self._edges(query.shape[1]))
            moved = rows[:, from_] * self._dropped(weights).transpose(1, 2)[..., None]
            out = torch.zeros_like(rows).index_add(1, to, moved)
        merged = out.flatten(-2) if self.shape.merge == "concat" else out.mean(-2)
        return (merged if self.bias is None else merged + self.bias).to(query.dtype)

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        edges: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        rows, scores = self._rows(query, source)
        batch, tokens, heads = rows.shape[:3]
        if edges is not None:
            _, joined, real = self._united(rows, scores, key_padding_mask)
            from_, to, weights = self._along_edges(joined, real, self._of_each(edges, query))
            flat = torch.zeros(heads, batch * tokens * tokens, dtype=weights.dtype, device=weights.device)
            found = flat.index_add(1, to * tokens + from_ % tokens, weights[0])
            return found.reshape(heads, batch, tokens, tokens).transpose(0, 1)
        if self.edges is None:
            return self._all_pairs(scores, key_padding_mask)
        from_, to, weights = self._along_edges(scores, key_padding_mask, self._edges(tokens))
        flat = torch.zeros(batch, heads, tokens * tokens, dtype=weights.dtype, device=weights.device)
        return flat.index_add(2, to * tokens + from_, weights).reshape(batch, heads, tokens, tokens)

    def _rows(self, query: Tensor, source: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """W x [batch, tokens, heads, size], and its score terms as target and as source [batch, heads, tokens]."""
        refuse_source(source)
        rows = wide(self.value(query).reshape(*query.shape[:-1], self.shape.config.num_heads, self.shape.size))
        target, own = ((rows * part).sum(-1).transpose(1, 2) for part in (self.target, self.source))
        return rows, (target, own)

    @staticmethod
    def _united(
        rows: Tensor, scores: tuple[Tensor, Tensor], key_padding_mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:
        """Rows, score terms and padding mask of all examples as one graph: one example of batch times tokens."""
        target, own = (part.transpose(0, 1).flatten(1)[None] for part in scores)
        mask = None if key_padding_mask is None else key_padding_mask.reshape(1, -1)
        return rows.flatten(0, 1)[None], (target, own), mask

    def _of_each(self, edges: Sequence[Tensor], query: Tensor) -> Tensor:
        """The distinct edges [2, edges], from and to, of the graph of all examples, including self-loops."""
        batch, tokens = query.shape[:2]
        if len(edges) != batch:
            raise InvalidValue.of("edges", f"{len(edges)} graphs", f"{batch}, one for each example")
        if self.shape.config.causal:
            raise Incompatible("a causal layer takes its edges from its options, not from the call")
        loops = torch.arange(tokens, device=query.device).repeat(2, 1).T
        found = [loops[:0]]
        for example, own in enumerate(edges):
            if own.ndim != 2 or own.shape[1] != 2 or own.dtype != torch.int64:
                given = f"{own.dtype} {tuple(own.shape)}"
                raise InvalidValue.of(f"edges[{example}]", given, "torch.int64 (edges, 2)")
            if own.numel() and not 0 <= int(own.min()) <= int(own.max()) < tokens:
                allowed = f"tokens from 0 to {tokens - 1}"
                raise InvalidValue.of(f"edges[{example}]", f"{int(own.min())} to {int(own.max())}", allowed)
            all_of_it = torch.cat([own.to(query.device), loops]) if self.shape.self_loops else own.to(query.device)
            found.append(torch.unique(all_of_it, dim=0) + example * tokens)
        return torch.cat(found).T

    def _dropped(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.shape.config.dropout, training=self.training)

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
        self, scores: tuple[Tensor, Tensor], key_padding_mask: Tensor | None, edges: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The positions where `edges` [2, edges] start and end, [edges] each, and their weights [batch, heads, edges].

        Edges to or from positions beyond the sequence are moved to position 0 and get weight zero.
        """
        tokens = scores[0].shape[-1]
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
