"""Keys and values of the best low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attn_variants.whole_layer import softmax_over


class LowRank(nn.Module):
    """Softmax attention over keys and values of each head that are replaced by the closest matrices of `rank`.

    Closest in the sum of squares, which truncating the singular values gives (Eckart and Young 1936).
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        if keep is not None:
            key, value = (rows.masked_fill(~keep[:, None, :, None], 0.0) for rows in (key, value))
        keys, values = basis(key, self.rank), basis(value, self.rank)
        scores = torch.matmul(torch.matmul(query, keys), torch.matmul(key, keys).transpose(-1, -2))
        allowed = None if keep is None else keep[:, None, None, :]
        weights = softmax_over(scores * query.shape[-1] ** -0.5, allowed)
        return torch.matmul(torch.matmul(weights, torch.matmul(value, values)), values.transpose(-1, -2))


def basis(rows: Tensor, rank: int) -> Tensor:
    """The first right singular vectors [..., size, rank] of rows [..., tokens, size]."""
    vectors: Tensor = _TopVectors.apply(torch.matmul(rows.transpose(-1, -2), rows), rank)  # type: ignore[no-untyped-call]
    return vectors


class _TopVectors(torch.autograd.Function):
    """Eigenvectors [..., size, rank] of the largest eigenvalues of symmetric matrices [..., size, size].

    The gradient is right for functions of the space that the vectors span, whichever vectors span it: only its turning
    towards the other vectors counts. So equal eigenvalues on one side of the cut, which padding makes, do no harm.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rank: int) -> Tensor:
        # Of what is not finite there are no eigenvectors, and one such matrix would fail all.
        finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
        vectors = torch.where(finite, vectors, torch.nan)
        ctx.save_for_backward(values, vectors)
        ctx.rank = rank
        top: Tensor = vectors[..., -rank:].contiguous()
        return top

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        values, vectors = ctx.saved_tensors
        cut = values.shape[-1] - ctx.rank
        rest, top = vectors[..., :cut], vectors[..., cut:]
        gap = values[..., None, cut:] - values[..., :cut, None]
        tiny = torch.finfo(values.dtype).eps * values[..., -1:, None].abs()
        # Below rounding both eigenvalues are zero, and no row has a part along either vector.
        turn = torch.where(gap > tiny, torch.matmul(rest.transpose(-1, -2), gradient) / gap, torch.zeros_like(gap))
        back = torch.matmul(torch.matmul(rest, turn), top.transpose(-1, -2))
        return (back + back.transpose(-1, -2)) / 2, None
