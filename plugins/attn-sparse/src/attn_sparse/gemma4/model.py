"""The decoder of Gemma 4: a block of its own, and embeddings for every layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.kernels.linear import Pack
from attn_models.attention import LayerAttention
from attn_models.decoder.block import Block, SharedTokens
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import (
    GATES,
    PLAIN,
    MixedPrecisionRMSNorm,
    build_feed_forward,
    build_norm,
    initialise,
    initialise_block,
)
from attn_models.decoder.mixture_of_experts import MixtralRouter, MixtureOfExperts
from torch import Tensor, nn

from attn_sparse.gemma4.config import Gemma4Config


class NormedRouter(MixtralRouter):
    """Scores are W (g ⊙ x / rms(x)) / √width, and weights a softmax over those chosen, times a scale of each expert."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.eps = config.norm_eps
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.expert_scale = nn.Parameter(torch.ones(self.experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router.forward`."""
        normed = nn.functional.rms_norm(rows, rows.shape[-1:], eps=self.eps)
        return super().forward(normed * self.scale * rows.shape[-1] ** -0.5)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Softmax over the chosen scores, times the scales of their experts."""
        return super().weigh(scores, chosen) * self.expert_scale[chosen]


class DenseAndExperts(MixtureOfExperts):
    """A feed-forward and experts that read the same hidden states, each between two norms of its own, added up."""

    def __init__(self, config: Gemma4Config, dense: nn.Module, norm: nn.Module) -> None:
        super().__init__(config, build_feed_forward)
        self.router = NormedRouter(config)
        self.dense, self.dense_norm, self.dense_after = dense, norm, build_norm(config)
        self.experts_norm, self.experts_after = build_norm(config), build_norm(config)

    def forward(self, hidden: Tensor, routed: Tensor | None = None) -> Tensor:
        """Map `hidden` [..., width], which the router reads too, to [..., width]."""
        mixed = super().forward(self.experts_norm(hidden), hidden if routed is None else routed)
        total: Tensor = self.dense_after(self.dense(self.dense_norm(hidden))) + self.experts_after(mixed)
        return total

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the matrices of the feed-forward and of every expert."""
        super().pack(pack)
        self.dense.pack(pack)  # type: ignore[operator]


class Gemma4Block(Block):
    """A block between norms, whose output is multiplied by `scalar`, [1].

    Where there are embeddings for every layer, its stream [..., width + layers · size] holds those of a token after its
    hidden state. Block number `place` adds norm(W_o (f(W_g h) ⊙ e)) to its output h, e being its own embedding.
    """

    scalar: Tensor
    place = 0

    def __init__(self, config: Gemma4Config, attention: LayerAttention, *, sparse: bool = False) -> None:
        wide = config.use_double_wide_mlp and attention.config.shares_kv
        own = dataclasses.replace(config, intermediate_size=2 * config.inner_width) if wide else config
        super().__init__(own, attention)
        if sparse:
            self.feed_forward = DenseAndExperts(config, self.feed_forward, self.feed_forward_norm)
            self.feed_forward_norm = nn.Identity()
            initialise_block(self, attention, config.num_layers)
        self.width, self.size = config.hidden_size, config.hidden_size_per_layer_input
        self.activation = PLAIN[GATES[config.feed_forward]]
        self.register_buffer("scalar", torch.ones(1))
        if self.size:
            self.layer_gate = nn.Linear(self.width, self.size, bias=False)
            self.layer_output = nn.Linear(self.size, self.width, bias=False)
            self.layer_output_norm = build_norm(config)
            initialise(self.layer_gate)
            initialise(self.layer_output)

    def forward(
        self,
        hidden: Tensor,
        shared_kv: Fields | None = None,
        lengths: Tensor | None = None,
        shared: SharedTokens | None = None,  # noqa: ARG002 -- only for blocks without a `forward` of their own
    ) -> Tensor:
        """See `Block.forward`; `hidden` is the stream."""
        return self._leaving(super().forward(hidden[..., : self.width], shared_kv, lengths), hidden)

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `Block.step`; `hidden` is the stream."""
        return self._leaving(super().step(hidden[..., : self.width], batch, state), hidden)

    def entering(self, hidden: Tensor) -> Tensor:
        """See `Block.entering`; `hidden` is the stream, or its first part."""
        return super().entering(hidden[..., : self.width])

    def _leaving(self, after: Tensor, stream: Tensor) -> Tensor:
        """The stream after the block, whose two sublayers gave `after` [..., width]."""
        if not self.size:
            return after * self.scalar
        start = self.width + self.place * self.size
        gated = self.activation(self.layer_gate(after)) * stream[..., start : start + self.size]
        after = (after + self.layer_output_norm(self.layer_output(gated))) * self.scalar
        return torch.cat([after, stream[..., self.width :]], dim=-1)


class StreamNorm(MixedPrecisionRMSNorm):
    """The norm of the hidden states, the first part of a stream."""

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise the first elements of rows [..., width of the stream]; returns [..., width]."""
        return super().forward(rows[..., : self.normalized_shape[0]])


class Gemma4Decoder(Decoder):
    """Blocks of Gemma 4. The embedding of a token for a layer is (norm(W x) + √size · table[token]) / √2.

    x is the token's usual embedding, W a projection, scaled by 1/√width, to the embeddings of all layers.
    """

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.size = config.hidden_size_per_layer_input
        self.norm = StreamNorm(config.hidden_size, eps=config.norm_eps)
        for place, block in enumerate(self.blocks):
            block.place = place  # type: ignore[assignment]
            attention: Any = block.attention
            if (
                config.attention_k_eq_v
                and not config.choice(place).options.get("window")
                and attention.value is not None
            ):
                attention.value.weight = attention.key.weight
        if self.size:
            every = config.num_layers * self.size
            self.layer_embedding = nn.Embedding(config.vocab_size_per_layer_input, every)
            self.layer_projection = nn.Linear(config.hidden_size, every, bias=False)
            self.layer_norm = MixedPrecisionRMSNorm(self.size, eps=config.norm_eps)
            initialise(self.layer_embedding, self.size**-0.5)
            initialise(self.layer_projection)

    def build_block(self, config: Any, attention: LayerAttention, *, sparse: bool) -> Block:
        """A `Gemma4Block`."""
        return Gemma4Block(config, attention, sparse=sparse)

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """The streams [..., width + layers · size] that enter the first block; see `Gemma4Block`."""
        hidden = super().embed(tokens, positions, longest)
        if not self.size:
            return hidden
        table = self.layer_embedding(tokens)
        told = torch.unflatten(table * table.new_tensor(self.size**0.5), -1, (-1, self.size))
        projected = self.layer_projection(hidden) * self.config.hidden_size**-0.5
        mixed = self.layer_norm(torch.unflatten(projected, -1, (-1, self.size))) + told
        return torch.cat([hidden, (mixed * 2**-0.5).flatten(-2)], dim=-1)
