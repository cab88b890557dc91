"""The decoder of MiniMax-01, whose blocks add to what their sublayers read."""

from __future__ import annotations

from typing import Any

from attn_core import Fields, LayerState, RaggedBatch
from attn_models.attention import LayerAttention
from attn_models.decoder.block import Block, SharedTokens, attended_documents, given
from attn_models.decoder.decoder import Decoder
from torch import Tensor

from attn_recurrent.minimax.config import MiniMaxConfig


class MiniMaxBlock(Block):
    """h = norm(x), a = norm(α h + β attention(h)), and α' a + β' F(a): the residual stream itself is normed."""

    def __init__(self, config: MiniMaxConfig, attention: LayerAttention, *, sparse: bool = False) -> None:
        super().__init__(config, attention, sparse=sparse)
        self.alpha, self.beta = config.attention_factors(attention.full_name)
        self.fed_alpha, self.fed_beta = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(
        self,
        hidden: Tensor,
        shared_kv: Fields | None = None,
        lengths: Tensor | None = None,
        shared: SharedTokens | None = None,  # noqa: ARG002 -- only for blocks without a `forward` of their own
    ) -> Tensor:
        """See `Block.forward`."""
        entering = self.entering(hidden)
        if lengths is None:
            return self._leaving(entering, self.attention(entering, **given(shared_kv)))
        return self._leaving(entering, attended_documents(self.attention, entering, lengths))

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `Block.step`."""
        entering = self.entering(hidden)
        return self._leaving(entering, self.attention.step(entering, batch, state))

    def _leaving(self, entering: Tensor, attended: Tensor) -> Tensor:
        fed = self.feed_forward_norm(self.alpha * entering + self.beta * self.dropout(attended))
        out: Tensor = self.fed_alpha * fed + self.fed_beta * self.dropout(self.feed_forward(fed))
        return out


class MiniMaxDecoder(Decoder):
    """A decoder of `MiniMaxBlock`s."""

    def build_block(self, config: Any, attention: LayerAttention, *, sparse: bool) -> Block:
        """A `MiniMaxBlock`."""
        return MiniMaxBlock(config, attention, sparse=sparse)
