"""The decoder of DeepSeek-V4: several residual streams, and experts that a token's id chooses."""

from __future__ import annotations

from typing import Any, cast

import torch
from attn_core.masking import wide
from attn_models.attention import LayerAttention
from attn_models.decoder.block import Block
from attn_models.decoder.layers import MixedPrecisionRMSNorm
from attn_models.decoder.mixture_of_experts import EPSILON, DeepseekV3Router
from torch import Tensor, nn

from attn_sparse.deepseek_v4 import DeepseekV4Config
from attn_sparse.streams.model import StreamBlock, StreamDecoder, mixing_weights

DIGITS = 3
"""Elements after the streams that hold a token's id, in base 256, which numbers of 16 bits represent exactly."""


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


class DeepseekV4Block(StreamBlock):
    """A block whose experts are chosen by roots of scores or, if it is `hashed`, by the digits of the token's id."""

    def __init__(self, config: DeepseekV4Config, attention: LayerAttention, *, sparse: bool, hashed: bool) -> None:
        super().__init__(config, attention, sparse=sparse)
        self.hashed = hashed
        if sparse:
            self.feed_forward.router = HashRouter(config) if hashed else RootRouter(config)

    def fed(self, rows: Tensor, more: Tensor) -> Tensor:
        """See `StreamBlock`."""
        if not self.hashed:
            return super().fed(rows, more)
        return cast("Tensor", self.feed_forward(rows, routed=torch.cat([rows, more], dim=-1)))


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


class DeepseekV4Decoder(StreamDecoder):
    """Several residual streams, with the digits of the token's id behind them."""

    def __init__(self, config: DeepseekV4Config) -> None:
        self._built = 0
        super().__init__(config)
        self.norm = StreamsNorm(config)

    def build_block(self, config: Any, attention: LayerAttention, *, sparse: bool) -> Block:
        """A `DeepseekV4Block`; blocks are built in order."""
        self._built += 1
        return DeepseekV4Block(
            config, attention, sparse=sparse, hashed=sparse and self._built <= config.num_hash_layers
        )

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """What enters the first block, [..., streams · width + digits]; see `StreamBlock`."""
        hidden = super().embed(tokens, positions, longest)
        digits = torch.stack([tokens >> (8 * place) & 255 for place in range(DIGITS)], dim=-1)
        return torch.cat([hidden, digits.to(hidden.dtype)], dim=-1)
