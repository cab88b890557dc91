"""Softmax attention through landmarks (Xiong et al. 2021, arXiv 2102.03902)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from attn_variants.whole_layer import ranks, softmax_over


class Landmarks(nn.Module):
    """softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v, q̃ and k̃ the means of `landmarks` stretches of the tokens.

    The inverse is found in `iterations` steps. With a `kernel`, a depthwise convolution of the values over so many
    tokens is added; learned: its `kernel` [heads, 1, kernel, 1].
    """

    def __init__(self, *, heads: int, landmarks: int, iterations: int, kernel: int | None) -> None:
        super().__init__()
        self.landmarks = landmarks
        self.iterations = iterations
        self.kernel = None if kernel is None else nn.Parameter(torch.empty(heads, 1, kernel, 1))
        if self.kernel is not None:
            nn.init.kaiming_uniform_(self.kernel, a=5**0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        place, count = ranks(keep, query)
        of = (place.clamp(min=0) * self.landmarks) // count.clamp(min=1)
        if keep is not None:
            query, key, value = (rows.masked_fill(~keep[:, None, :, None], 0.0) for rows in (query, key, value))
        query = query * query.shape[-1] ** -0.5
        sizes = stretches(of, keep, self.landmarks)
        marks = [means(rows, of, sizes) for rows in (query, key)]
        seen = (sizes > 0)[:, None, None, :]
        rows_seen = seen.transpose(-1, -2)
        real = None if keep is None else keep[:, None, None, :]
        left = softmax_over(torch.matmul(query, marks[1].transpose(-1, -2)), seen)
        middle = softmax_over(torch.matmul(marks[0], marks[1].transpose(-1, -2)), seen & rows_seen)
        right = softmax_over(
            torch.matmul(marks[0], key.transpose(-1, -2)), rows_seen if real is None else real & rows_seen
        )
        inverse = pseudoinverse(middle, self.iterations)
        out = torch.matmul(torch.matmul(left, inverse), torch.matmul(right, value))
        if self.kernel is not None:
            kernel = self.kernel.to(value.dtype)
            out = out + conv2d(value, kernel, padding=(kernel.shape[2] // 2, 0), groups=kernel.shape[0])
        return out


def stretches(of: Tensor, keep: Tensor | None, landmarks: int) -> Tensor:
    """How many real tokens each landmark stands for, [batch, landmarks]; `of` [batch, tokens] names their landmarks."""
    real = torch.ones_like(of) if keep is None else keep.to(of.dtype)
    return torch.zeros(of.shape[0], landmarks, dtype=of.dtype, device=of.device).scatter_add(1, of, real)


def means(rows: Tensor, of: Tensor, sizes: Tensor) -> Tensor:
    """Means [batch, heads, landmarks, size] of the rows [batch, heads, tokens, size] of each landmark, padding zero."""
    shape = (*rows.shape[:2], sizes.shape[1], rows.shape[3])
    index = of[:, None, :, None].expand(rows.shape)
    sums = torch.zeros(shape, dtype=rows.dtype, device=rows.device).scatter_add(2, index, rows)
    return sums / sizes.clamp(min=1)[:, None, :, None]


def pseudoinverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of [..., size, size] by the iteration of the paper's equation 13, of third order."""
    column, row = matrix.sum(-2).amax(-1), matrix.sum(-1).amax(-1)
    tiny = torch.finfo(matrix.dtype).tiny
    inverse = matrix.transpose(-1, -2) / (column * row).clamp(min=tiny)[..., None, None]
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = torch.matmul(matrix, inverse)
        inner = torch.matmul(product, 7 * one - product)
        inverse = 0.25 * torch.matmul(inverse, 13 * one - torch.matmul(product, 15 * one - inner))
    return inverse
