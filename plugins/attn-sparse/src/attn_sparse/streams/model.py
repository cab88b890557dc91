"""Decoders with several residual streams, which every sublayer mixes, and limited feed-forwards or experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.masking import wide
from attn_models.attention import LayerAttention
from attn_models.decoder.block import Block, SharedTokens, attended_documents
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import GatedFeedForward, MixedPrecisionRMSNorm, initialise_block
from attn_models.decoder.mixture_of_experts import MixtureOfExperts
from torch import Tensor, nn

from attn_sparse.streams import StreamConfig


class LimitedFeedForward(GatedFeedForward):
    """W₂ (silu(min(W_g x, l)) ⊙ u), u = W₁ x clamped to ±l."""

    def __init__(self, config: Any, limit: float) -> None:
        super().__init__(config)
        self.limit = limit

    def meet(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine W_g x and W₁ x, [..., inner width] each."""
        return super().meet(gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit))

    def parts(self) -> None:
        """None: fused block kernels know no limit."""


class Streams(nn.Module):
    """Manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880): how a sublayer reads and writes the
    residual streams of a token.

    Of the normed streams z = W rms(s) it computes weights σ(a₁ z₁ + b₁) of the streams in the sublayer's input, weights
    2σ(a₂ z₂ + b₂) of its output in each stream, and a matrix that mixes the streams, softmax(a₃ z₃ + b₃) with rows and
    columns that are normalised in turns. Learned: `function` W, `base` b and `scale` a.
    """

    def __init__(self, config: StreamConfig) -> None:
        super().__init__()
        self.config, self.count = config, config.hc_mult
        outputs = self.count * (2 + self.count)
        self.function = nn.Parameter(torch.empty(outputs, self.count * config.hidden_size))
        self.base = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.ones(3))
        nn.init.normal_(self.function, std=0.02)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The input [..., width] of a sublayer, the weights [..., streams] of its output, and the mixed streams, of
        streams [..., streams, width]."""
        count, eps = self.count, self.config.hc_eps
        weights = mixing_weights(streams, self.function, self.config.norm_eps)
        into, out, across = torch.split(weights, [count, count, count * count], dim=-1)
        bases = torch.split(wide(self.base), [count, count, count * count])
        scales = wide(self.scale)
        into = torch.sigmoid(into * scales[0] + bases[0]) + eps
        out = 2 * torch.sigmoid(out * scales[1] + bases[1])
        matrix = torch.unflatten(across * scales[2] + bases[2], -1, (count, count)).softmax(-1) + eps
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        entering = (into[..., None] * streams).sum(-2).to(streams.dtype)
        return entering, out.to(streams.dtype), matrix.to(streams.dtype).transpose(-1, -2) @ streams


def mixing_weights(streams: Tensor, function: Tensor, eps: float) -> Tensor:
    """W rms(s) [..., outputs], at least float32, of streams [..., streams, width], which are normed together."""
    rows = wide(streams.flatten(-2))
    return nn.functional.linear(nn.functional.rms_norm(rows, rows.shape[-1:], eps=eps), wide(function))


class StreamBlock(Block):
    """Attention and experts, or a feed-forward, each of which reads a mixture of streams and writes to all of them.

    The tensor between blocks, [..., streams · width + more], holds the streams, and what else blocks pass on.
    """

    def __init__(self, config: StreamConfig, attention: LayerAttention, *, sparse: bool) -> None:
        super().__init__(config, attention)
        self.config = config
        build = partial(LimitedFeedForward, limit=config.swiglu_limit)
        self.feed_forward = MixtureOfExperts(config, build) if sparse else build(config)
        initialise_block(self, attention, config.num_layers)
        self.attention_streams, self.feed_forward_streams = Streams(config), Streams(config)

    def forward(
        self,
        hidden: Tensor,
        shared_kv: Fields | None = None,  # noqa: ARG002 -- none are shared
        lengths: Tensor | None = None,
        shared: SharedTokens | None = None,  # noqa: ARG002 -- only for blocks without a `forward` of their own
    ) -> Tensor:
        """See `Block.forward`."""
        if lengths is None:
            return self._through(hidden, self.attention)
        return self._through(hidden, lambda rows: attended_documents(self.attention, rows, lengths))

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `Block.step`."""
        return self._through(hidden, lambda rows: self._attended(rows, rows, batch, state))

    def entering(self, hidden: Tensor) -> Tensor:
        """See `Block.entering`."""
        return super().entering(self.attention_streams(self._split(hidden)[0])[0])

    def fed(self, rows: Tensor, more: Tensor) -> Tensor:  # noqa: ARG002 -- most families pass on nothing
        """The output of the feed-forward for rows [..., width] and what follows the streams, [..., more]."""
        return cast("Tensor", self.feed_forward(rows))

    def _split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The streams [..., streams, width] of the tensor between blocks, and what follows them, [..., more]."""
        width = self.config.hc_mult * self.config.hidden_size
        return torch.unflatten(hidden[..., :width], -1, (self.config.hc_mult, -1)), hidden[..., width:]

    def _through(self, hidden: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        streams, more = self._split(hidden)
        entering, out, mixed = self.attention_streams(streams)
        attended = self.adding(attend(self.attention_norm(entering)))
        streams = mixed + out[..., None] * attended[..., None, :]
        entering, out, mixed = self.feed_forward_streams(streams)
        fed = self.adding(self.fed(self.feed_forward_norm(entering), more))
        streams = mixed + out[..., None] * fed[..., None, :]
        return torch.cat([streams.flatten(-2), more], dim=-1)


class MeanNorm(MixedPrecisionRMSNorm):
    """The norm of the mean of the streams in rows [..., streams · width + more]."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(config.hidden_size, eps=config.norm_eps)
        self.count = config.hc_mult

    def forward(self, rows: Tensor) -> Tensor:
        """The normalised means, [..., width]."""
        width = self.count * self.normalized_shape[0]
        return super().forward(torch.unflatten(rows[..., :width], -1, (self.count, -1)).mean(-2))


class StreamDecoder(Decoder):
    """Blocks of several residual streams, each of which is the token's embedding at first; their mean is read."""

    config: Any

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(config)
        self.norm = MeanNorm(config)

    def build_block(self, config: Any, attention: LayerAttention, *, sparse: bool) -> Block:
        """A `StreamBlock`."""
        return StreamBlock(config, attention, sparse=sparse)

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """What enters the first block, [..., streams · width]; see `StreamBlock`."""
        return super().embed(tokens, positions, longest).repeat(*[1] * tokens.ndim, self.config.hc_mult)
