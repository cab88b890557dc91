"""The decoder of DeepSeek-V4: several residual streams, and experts that a token's id chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.masking import wide
from attn_models.attention import LayerAttention
from attn_models.decoder.block import Block, attended_documents
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import GatedFeedForward, MixedPrecisionRMSNorm, initialise_block
from attn_models.decoder.mixture_of_experts import EPSILON, DeepseekV3Router, MixtureOfExperts
from torch import Tensor, nn

from attn_sparse.deepseek_v4.config import DeepseekV4Config

DIGITS = 3
"""Elements after the streams that hold a token's id, in base 256, which numbers of 16 bits represent exactly."""


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


class RootRouter(DeepseekV3Router):
    """`DeepseekV3Router` with √softplus(W x) in place of sigmoids."""

    def selection_scores(self, scores: Tensor) -> Tensor:
        """Roots plus the load-balancing biases."""
        return rooted(scores) + self.correction

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Roots of the chosen scores, normalised to sum to the scale."""
        parts = rooted(scores).gather(-1, chosen)
        return parts / (parts.sum(dim=-1, keepdim=True) + EPSILON) * self.scale

    def affinity(self, scores: Tensor) -> Tensor:
        """Roots normalised to sum to one."""
        parts = rooted(scores)
        return parts / (parts.sum(dim=-1, keepdim=True) + EPSILON)


def rooted(scores: Tensor) -> Tensor:
    """√softplus of router scores."""
    return nn.functional.softplus(scores).sqrt()


class HashRouter(RootRouter):
    """The experts of a token are those in the row of a `table` [vocabulary, chosen] for its id, weighted by scores.

    Its rows are hidden states followed by the `DIGITS` of tokens.
    """

    table: Tensor

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        del self.correction
        rows, places = torch.arange(config.vocab_size)[:, None], torch.arange(self.chosen)
        self.register_buffer("table", (rows + places) % self.experts)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router.forward`; the load is not counted, as it is fixed."""
        scores, digits = wide(self.score(rows[:, :-DIGITS])), rows[:, -DIGITS:].long()
        chosen = self.table[sum(digits[:, place] << (8 * place) for place in range(DIGITS))].long()
        return chosen, self.weigh(scores, chosen).to(rows.dtype)

    def update_biases(self) -> None:
        """Nothing to update."""


class Streams(nn.Module):
    """Manifold-constrained hyper-connections (Xie et al. 2025, arXiv 2512.24880): how a sublayer reads and writes the
    residual streams of a token.

    Of the normed streams z = W rms(s) it computes weights σ(a₁ z₁ + b₁) of the streams in the sublayer's input, weights
    2σ(a₂ z₂ + b₂) of its output in each stream, and a matrix that mixes the streams, softmax(a₃ z₃ + b₃) with rows and
    columns that are normalised in turns. Learned: `function` W, `base` b and `scale` a.
    """

    def __init__(self, config: DeepseekV4Config) -> None:
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

    The tensor between blocks, [..., streams · width + digits], holds the streams and the digits of the token's id.
    """

    def __init__(self, config: DeepseekV4Config, attention: LayerAttention, *, sparse: bool, hashed: bool) -> None:
        super().__init__(config, attention)
        self.config, self.hashed = config, hashed
        build = partial(LimitedFeedForward, limit=config.swiglu_limit)
        if sparse:
            self.feed_forward = MixtureOfExperts(config, build)
            self.feed_forward.router = HashRouter(config) if hashed else RootRouter(config)
        else:
            self.feed_forward = build(config)
        initialise_block(self, attention, config.num_layers)
        self.attention_streams, self.feed_forward_streams = Streams(config), Streams(config)

    def forward(self, hidden: Tensor, shared_kv: Fields | None = None, lengths: Tensor | None = None) -> Tensor:  # noqa: ARG002 -- none are shared
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

    def _split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The streams [..., streams, width] and the digits [..., digits] of the tensor between blocks."""
        width = self.config.hc_mult * self.config.hidden_size
        return torch.unflatten(hidden[..., :width], -1, (self.config.hc_mult, -1)), hidden[..., width:]

    def _through(self, hidden: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        streams, digits = self._split(hidden)
        entering, out, mixed = self.attention_streams(streams)
        attended = self.adding(attend(self.attention_norm(entering)))
        streams = mixed + out[..., None] * attended[..., None, :]
        entering, out, mixed = self.feed_forward_streams(streams)
        normed = self.feed_forward_norm(entering)
        routed = {"routed": torch.cat([normed, digits], dim=-1)} if self.hashed else {}
        fed = self.adding(cast("Any", self.feed_forward)(normed, **routed))
        streams = mixed + out[..., None] * fed[..., None, :]
        return torch.cat([streams.flatten(-2), digits], dim=-1)


class StreamsNorm(MixedPrecisionRMSNorm):
    """The norm of Σᵢ (σ(a zᵢ + bᵢ) + ε) sᵢ over streams s, z = W rms(s), W being `function`, b `base` and a `scale`."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config.hidden_size, eps=config.norm_eps)
        self.config = config
        self.function = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.zeros(config.hc_mult))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.function, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """Mix and normalise rows [..., streams · width + digits]; returns [..., width]."""
        count = self.config.hc_mult
        streams = torch.unflatten(rows[..., : count * self.config.hidden_size], -1, (count, -1))
        weights = mixing_weights(streams, self.function, self.config.norm_eps) * wide(self.scale) + wide(self.base)
        mixed = ((torch.sigmoid(weights) + self.config.hc_eps)[..., None] * streams).sum(-2)
        return super().forward(mixed.to(streams.dtype))


class DeepseekV4Decoder(Decoder):
    """Blocks of several residual streams, each of which is the token's embedding at first."""

    config: Any

    def __init__(self, config: DeepseekV4Config) -> None:
        self._built = 0
        super().__init__(config)
        self.norm = StreamsNorm(config)

    def build_block(self, config: Any, attention: LayerAttention, *, sparse: bool) -> Block:
        """A `StreamBlock`; blocks are built in order."""
        self._built += 1
        return StreamBlock(config, attention, sparse=sparse, hashed=sparse and self._built <= config.num_hash_layers)

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """What enters the first block, [..., streams · width + digits]; see `StreamBlock`."""
        hidden = super().embed(tokens, positions, longest)
        digits = torch.stack([tokens >> (8 * place) & 255 for place in range(DIGITS)], dim=-1)
        return torch.cat([hidden.repeat(*[1] * tokens.ndim, self.config.hc_mult), digits.to(hidden.dtype)], dim=-1)
