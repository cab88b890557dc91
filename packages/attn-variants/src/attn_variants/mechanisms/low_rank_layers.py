"""The inner modules, between the projections and the output, of Linformer, Nyströmformer and low-rank attention."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import InvalidValue, WrongState
from attn_core.first_order import first_order_only
from torch import Tensor, nn
from torch.nn.functional import conv2d

from attn_variants.compute.distribution import softmax_over
from attn_variants.mechanisms.whole_sequence_layer import ranks


class LengthProjection(nn.Module):
    """Linformer: softmax(q (Eᵀ k)ᵀ / √d) (Fᵀ v), with E and F [length, rank], uniform in ±1 / √rank.

    Learned: `key_weight` [sets, length, rank] and, unless keys and values share it, `value_weight`; one set is
    shared by all heads. Shorter sequences use the first rows.
    """

    def __init__(self, *, length: int, rank: int, sets: int, kinds: int) -> None:
        super().__init__()
        self.length = length
        self.key_weight = nn.Parameter(torch.empty(sets, length, rank))
        self.value_weight = nn.Parameter(torch.empty(sets, length, rank)) if kinds == 2 else None
        for weight in self.parameters():
            nn.init.uniform_(weight, -(rank**-0.5), rank**-0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]; raises `InvalidValue` for more tokens than `length`."""
        tokens = key.shape[2]
        if tokens > self.length:
            raise InvalidValue.of(
                "query", f"{tokens} tokens", f"at most {self.length}, the length for which the layer was built"
            )
        if key_padding_mask is not None:
            key, value = (rows.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for rows in (key, value))
        into_key = self.key_weight[:, :tokens].to(key.dtype).transpose(-1, -2)
        into_value = into_key
        if self.value_weight is not None:
            into_value = self.value_weight[:, :tokens].to(key.dtype).transpose(-1, -2)
        scores = torch.matmul(query, torch.matmul(into_key, key).transpose(-1, -2)) * query.shape[-1] ** -0.5
        return torch.matmul(softmax_over(scores, None), torch.matmul(into_value, value))


class SharedLengthProjection(nn.Module):
    """A reference to the `LengthProjection` of another layer, to whose parameters alone the weights belong."""

    def __init__(self) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule of this layer.
        self._used: tuple[LengthProjection] | None = None

    def use(self, projection: LengthProjection) -> None:
        """Use this projection from now on."""
        self._used = (projection,)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """See `LengthProjection.forward`; raises `WrongState` before `use` was called."""
        if self._used is None:
            message = "a linformer layer with sharing 'layers' uses the projections of the first layer"
            raise WrongState(f"{message}: call share_weights() of the mechanism with all layers of the model")
        out: Tensor = self._used[0](query, key, value, key_padding_mask)
        return out


class Landmarks(nn.Module):
    """softmax(q k̃ᵀ) softmax(q̃ k̃ᵀ)⁺ softmax(q̃ kᵀ) v, with q̃ and k̃ the means of `landmarks` segments of the tokens.

    The inverse is computed in `iterations` steps. With a `kernel`, a depthwise convolution of the values over that many
    tokens is added; learned: its `kernel` [heads, 1, kernel, 1].
    """

    def __init__(self, *, heads: int, landmarks: int, iterations: int, kernel: int | None) -> None:
        super().__init__()
        self.landmarks = landmarks
        self.iterations = iterations
        self.kernel = None if kernel is None else nn.Parameter(torch.empty(heads, 1, kernel, 1))
        if self.kernel is not None:
            nn.init.kaiming_uniform_(self.kernel, a=5**0.5)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        place, count = ranks(key_padding_mask, query)
        of = (place.clamp(min=0) * self.landmarks) // count.clamp(min=1)
        if key_padding_mask is not None:
            query, key, value = (
                rows.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for rows in (query, key, value)
            )
        query = query * query.shape[-1] ** -0.5
        sizes = stretches(of, key_padding_mask, self.landmarks)
        marks = [means(rows, of, sizes) for rows in (query, key)]
        seen = (sizes > 0)[:, None, None, :]
        rows_seen = seen.transpose(-1, -2)
        real = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
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


def stretches(of: Tensor, key_padding_mask: Tensor | None, landmarks: int) -> Tensor:
    """The number of real tokens of each landmark [batch, landmarks]; `of` [batch, tokens] are the tokens' landmarks."""
    real = torch.ones_like(of) if key_padding_mask is None else key_padding_mask.to(of.dtype)
    return torch.zeros(of.shape[0], landmarks, dtype=of.dtype, device=of.device).scatter_add(1, of, real)


def means(rows: Tensor, of: Tensor, sizes: Tensor) -> Tensor:
    """Means [batch, heads, landmarks, size] of the rows [batch, heads, tokens, size] of each landmark.

    Padded rows must be zero; `sizes` are the numbers of real tokens.
    """
    shape = (*rows.shape[:2], sizes.shape[1], rows.shape[3])
    index = of[:, None, :, None].expand(rows.shape)
    sums = torch.zeros(shape, dtype=rows.dtype, device=rows.device).scatter_add(2, index, rows)
    return sums / sizes.clamp(min=1)[:, None, :, None]


def pseudoinverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of [..., size, size] by the third-order iteration of the paper's equation 13."""
    column, row = matrix.sum(-2).amax(-1), matrix.sum(-1).amax(-1)
    tiny = torch.finfo(matrix.dtype).tiny
    inverse = matrix.transpose(-1, -2) / (column * row).clamp(min=tiny)[..., None, None]
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = torch.matmul(matrix, inverse)
        inner = torch.matmul(product, 7 * one - product)
        inverse = 0.25 * torch.matmul(inverse, 13 * one - torch.matmul(product, 15 * one - inner))
    return inverse


class LowRank(nn.Module):
    """Softmax attention over keys and values of each head, replaced by their closest matrices of `rank`.

    These minimise the sum of squared differences, by truncating the singular values (Eckart and Young 1936).
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        if key_padding_mask is not None:
            key, value = (rows.masked_fill(~key_padding_mask[:, None, :, None], 0.0) for rows in (key, value))
        keys, values = basis(key, self.rank), basis(value, self.rank)
        scores = torch.matmul(torch.matmul(query, keys), torch.matmul(key, keys).transpose(-1, -2))
        allowed = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        weights = softmax_over(scores * query.shape[-1] ** -0.5, allowed)
        return torch.matmul(torch.matmul(weights, torch.matmul(value, values)), values.transpose(-1, -2))


def basis(rows: Tensor, rank: int) -> Tensor:
    """The first right singular vectors [..., size, rank] of rows [..., tokens, size]."""
    vectors: Tensor = _TopVectors.apply(torch.matmul(rows.transpose(-1, -2), rows), rank)  # type: ignore[no-untyped-call]
    return vectors


class _TopVectors(torch.autograd.Function):
    """Eigenvectors [..., size, rank] of the largest eigenvalues of symmetric matrices [..., size, size].

    The gradient is correct for functions of the subspace that the vectors span, independent of the basis: it includes
    only rotations towards the other eigenvectors. So equal eigenvalues on one side of the cut, as with padding, are
    harmless.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rank: int) -> Tensor:
        # eigh fails for the whole batch if one matrix is not finite; the vectors of such a matrix are NaN.
        finite = matrix.isfinite().all(-1).all(-1)[..., None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
        vectors = torch.where(finite, vectors, torch.nan)
        ctx.save_for_backward(values, vectors)
        ctx.rank = rank
        top: Tensor = vectors[..., -rank:].contiguous()
        return top

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        values, vectors = ctx.saved_tensors
        cut = values.shape[-1] - ctx.rank
        rest, top = vectors[..., :cut], vectors[..., cut:]
        gap = values[..., None, cut:] - values[..., :cut, None]
        tiny = torch.finfo(values.dtype).eps * values[..., -1:, None].abs()
        # Gaps within rounding error mean that both eigenvalues are zero; no row has a component along either vector.
        turn = torch.where(gap > tiny, torch.matmul(rest.transpose(-1, -2), gradient) / gap, torch.zeros_like(gap))
        back = torch.matmul(torch.matmul(rest, turn), top.transpose(-1, -2))
        return (back + back.transpose(-1, -2)) / 2, None
