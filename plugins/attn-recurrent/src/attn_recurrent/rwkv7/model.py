"""The decoder of RWKV-7, in which later layers read the values of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_models.attention import LayerAttention
from attn_models.decoder.block import AttentionBlock, Block, SharedTokens
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import initialise
from torch import Tensor, nn

from attn_recurrent.rwkv7.config import Rwkv7ModelConfig
from attn_recurrent.rwkv7.layer import LowRank, Rwkv7Layer


class ValueBlock(AttentionBlock):
    """x + mixing(norm(x)). Between blocks, the hidden state of a token is followed by its values in the first layer.

    The `first` layer writes these values, later ones of the same mechanism read them.
    """

    def __init__(self, config: Rwkv7ModelConfig, attention: LayerAttention, *, first: bool) -> None:
        super().__init__(config, attention)
        self.width, self.first = config.hidden_size, first
        if isinstance(self.attention, Rwkv7Layer) and not first:
            self.attention.value_mix = LowRank(self.width, config.value_rank, nn.Identity())
            for layer in (self.attention.value_mix.down, self.attention.value_mix.up):
                initialise(layer)

    def forward(
        self,
        hidden: Tensor,
        shared_kv: Fields | None = None,  # noqa: ARG002 -- none are shared
        lengths: Tensor | None = None,
        shared: SharedTokens | None = None,  # noqa: ARG002 -- only for blocks without a `forward` of their own
    ) -> Tensor:
        """See `Block.forward`; `hidden` is followed by values."""
        if lengths is not None:
            return torch.cat([self(document) for document in torch.split(hidden, lengths.tolist(), dim=1)], dim=1)
        return self._through(hidden, lambda rows, first: self.attention.mixed(rows, first)[:2], self.attention)

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `Block.step`; `hidden` is followed by values."""
        return self._through(
            hidden,
            lambda rows, first: self.attention.mixed_step(rows, first, batch, state),
            lambda rows: self._attended(rows, rows, batch, state),
        )

    def entering(self, hidden: Tensor) -> Tensor:
        """See `Block.entering`."""
        return super().entering(hidden[..., : self.width])

    def _through(
        self,
        hidden: Tensor,
        mix: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
        attend: Callable[[Tensor], Tensor],
    ) -> Tensor:
        rows, values = hidden[..., : self.width], hidden[..., self.width :]
        entering = self.attention_norm(rows)
        if isinstance(self.attention, Rwkv7Layer):
            attended, own = mix(entering, None if self.first else values)
            values = own if self.first else values
        else:
            attended = attend(entering)
        return torch.cat([rows + self.adding(attended), values], dim=-1)


class HiddenNorm(nn.Module):
    """The norm of the hidden states, without the values that follow them."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.plain, self.width = norm, width

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise rows [..., 2 · width] to [..., width]."""
        return cast("Tensor", self.plain(rows[..., : self.width]))


class Rwkv7Decoder(Decoder):
    """Blocks that mix time and blocks that mix channels, in turns."""

    def __init__(self, config: Rwkv7ModelConfig) -> None:
        self._found = False
        super().__init__(config)
        self.norm = HiddenNorm(self.norm, config.hidden_size)

    def build_block(self, config: Rwkv7ModelConfig, attention: LayerAttention, *, sparse: bool) -> Block:  # type: ignore[override]  # noqa: ARG002
        """A `ValueBlock`; blocks are built in order."""
        first = not self._found and attention.mechanism.name == "rwkv7"
        self._found = self._found or first
        return ValueBlock(config, attention, first=first)

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """Embeddings, followed by zeros for the values of the first layer."""
        hidden = super().embed(tokens, positions, longest)
        return torch.cat([hidden, torch.zeros_like(hidden)], dim=-1)
