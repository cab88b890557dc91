"""The encoder-decoder Transformer (Vaswani et al. 2017, arXiv 1706.03762)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from attn_core import Capability, Fields, LayerState, RaggedBatch
from attn_core.batch import ModelState
from attn_core.errors import Incompatible, InvalidValue
from attn_core.models import FindsLargest
from attn_core.rotary import sinusoidal
from attn_core.state_faults import names_wrong_states
from attn_core.stores import ModelSpecs
from torch import Tensor, nn

from attn_models.attention import (
    LayerAttention,
    cross_attention,
    decoder_attention,
    encoder_attention,
    share_weights,
)
from attn_models.decoder.block import replay_step, require_same_shape
from attn_models.decoder.layers import build_feed_forward, build_norm, initialise
from attn_models.encoder_decoder.config import AttendingConfig
from attn_models.encoder_decoder.encoder_input import EncoderOutput, encoder_input_lengths

Inner = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """A residual connection: norm(x + F(x)) (post-norm, Vaswani et al. 2017, section 3.1), or x + F(norm(x)) (pre-norm,
    arXiv 2002.04745)."""

    def __init__(self, config: AttendingConfig) -> None:
        super().__init__()
        self.pre = config.pre_norm
        self.norm: nn.Module = build_norm(config.block)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, inner: Inner) -> Tensor:
        """Apply the sublayer `inner` to `hidden` [..., width] with norm, dropout and the residual connection."""
        entering = self.entering(hidden)
        after: Tensor = hidden + self.dropout(inner(entering))
        normed: Tensor = after if self.pre else self.norm(after)
        return normed

    def entering(self, hidden: Tensor) -> Tensor:
        """The input of the sublayer F: `hidden`, normalised in a pre-norm block."""
        normed: Tensor = self.norm(hidden) if self.pre else hidden
        return normed


class EncoderBlock(nn.Module):
    """A block of the encoder: self-attention, then the feed-forward."""

    def __init__(self, config: AttendingConfig, chosen: LayerAttention) -> None:
        super().__init__()
        # Any: a mechanism may build any module that has the methods of AttentionLayer.
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.around_attention = Residual(config)
        self.feed_forward = build_feed_forward(config.block)
        self.around_feed_forward = Residual(config)

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Map `hidden` [batch, source, width] to the same shape; `key_padding_mask` [batch, source] is True for real
        tokens."""
        attended = self.around_attention(hidden, partial(self.attention, key_padding_mask=key_padding_mask))
        out: Tensor = self.around_feed_forward(attended, self.feed_forward)
        return out


class DecoderBlock(nn.Module):
    """A block of the decoder: causal self-attention, cross-attention, then the feed-forward."""

    def __init__(self, config: AttendingConfig, own: LayerAttention, cross: LayerAttention) -> None:
        super().__init__()
        self.incremental = own.mechanism.can(Capability.INCREMENTAL)
        self.attention: Any = own.mechanism.build(own.config)
        self.around_attention = Residual(config)
        self.cross: Any = cross.mechanism.build(cross.config)
        self.around_cross = Residual(config)
        self.feed_forward = build_feed_forward(config.block)
        self.around_feed_forward = Residual(config)

    def forward(self, hidden: Tensor, memory: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Compute whole sequences [batch, tokens, width] over the encoder output `memory` [batch, source, width]."""
        return self._through(
            hidden, self.attention, partial(self.cross, source=memory, key_padding_mask=key_padding_mask)
        )

    def step(self, hidden: Tensor, batch: RaggedBatch, own: LayerState, source: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, width] to [tokens, width]."""

        def attend(rows: Tensor) -> Tensor:
            if self.incremental:
                return require_same_shape(self.attention.step(rows, batch, own), rows)
            return require_same_shape(replay_step(self.attention, rows, batch, own), rows)

        def look(rows: Tensor) -> Tensor:
            return require_same_shape(self.cross.step(rows, batch, source), rows)

        return self._through(hidden, attend, look)

    def weights(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Weights of the cross-attention [batch, heads, tokens, source]."""
        attended = self.around_attention(hidden, self.attention)
        weights: Tensor = self.cross.weights(self.around_cross.entering(attended), memory)
        return weights

    def _through(self, hidden: Tensor, own: Inner, cross: Inner) -> Tensor:
        attended = self.around_attention(hidden, own)
        informed = self.around_cross(attended, cross)
        out: Tensor = self.around_feed_forward(informed, self.feed_forward)
        return out


class Transformer(nn.Module):
    """The Transformer; encoder, decoder and unembedding share one embedding table (section 3.4).

    Implements `attn_core.models.SourceModel`.
    """

    def __init__(self, config: AttendingConfig) -> None:
        super().__init__()
        sizes = config.attention_sizes
        longest, source = sizes | {"max_seq_len": config.max_seq_len}, sizes | {"max_seq_len": config.max_encoder_len}
        reads = [
            encoder_attention(config.encoder, config.encoder_options, layer=layer, **source)
            for layer in range(config.num_layers)
        ]
        writes = decoder_attention(config.decoder, config.decoder_options, **longest)
        self.chosen = cross_attention(config.cross, config.cross_options, **source)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len, self.max_encoder_len = config.max_seq_len, config.max_encoder_len
        # Any: a StoredEmbedding after `quantize_model`.
        self.embedding: Any = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head: Any = None
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(config, each) for each in reads)
        share_weights(reads, [block.attention for block in self.encoder])
        self.decoder = nn.ModuleList(DecoderBlock(config, writes, self.chosen) for _ in range(config.decoder_layers))
        pre = config.pre_norm
        self.encoder_norm: nn.Module = build_norm(config.block) if pre else nn.Identity()
        self.decoder_norm: nn.Module = build_norm(config.block) if pre else nn.Identity()
        # Multiplied by √width, the embeddings have the scale of the sinusoids that are added to them.
        initialise(self.embedding, config.hidden_size**-0.5)
        self._specs = {f"decoder.{i}": writes.states for i in range(config.decoder_layers)}
        self._specs |= {f"cross.{i}": self.chosen.states for i in range(config.decoder_layers)}
        self._mechanisms = {f"decoder.{i}": writes.mechanism.name for i in range(config.decoder_layers)}
        self._mechanisms |= {f"cross.{i}": self.chosen.mechanism.name for i in range(config.decoder_layers)}

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each cross-attention."""
        return (self.chosen.mechanism.name,) * len(self.decoder)

    def forward(self, tokens: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of tokens [batch, tokens] over sources [batch, source]."""
        return self.logits(self.hidden(tokens, self.encoder_output(source, key_padding_mask), key_padding_mask))

    def encoder_output(self, source: Tensor | None, key_padding_mask: Tensor | None = None) -> EncoderOutput:
        """The output of the encoder for sources [batch, source]; the decoder starts without a state."""
        return EncoderOutput(self._read(source, key_padding_mask), {})

    def hidden(self, tokens: Tensor, encoded: EncoderOutput, key_padding_mask: Tensor | None) -> Tensor:
        """Hidden states [batch, tokens, width] of whole sequences over the output of the encoder for sources of which
        `key_padding_mask` [batch, source], bool, is False for padding, at the end."""
        hidden = self._embed_tokens(tokens)
        for block in self._decoder():
            hidden = block(hidden, encoded.memory, key_padding_mask)
        normed: Tensor = self.decoder_norm(hidden)
        return normed

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """The encoder states of each block's cross-attention for one source [source], by layer and state name."""
        return self.source_states(self.encoder_output(source[None]))

    def source_states(self, encoded: EncoderOutput) -> Mapping[str, Mapping[str, Fields]]:
        """The encoder states from the output of the encoder for one source without padding."""
        return {f"cross.{i}": block.cross.encode(encoded.memory[0]) for i, block in enumerate(self._decoder())}

    def state_specs(self) -> ModelSpecs:
        """The states of every block's self-attention and cross-attention."""
        return self._specs

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanisms of self-attention and cross-attention of each block, by layer name."""
        return self._mechanisms

    @names_wrong_states
    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        hidden = self._embed(tokens, batch.positions)
        for i, block in enumerate(self._decoder()):
            hidden = block.step(hidden, batch, state[f"decoder.{i}"], state[f"cross.{i}"])
        normed: Tensor = self.decoder_norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        if self.head is not None:
            logits: Tensor = self.head(hidden)
            return logits
        return nn.functional.linear(hidden, self.embedding.weight)

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.GreedyHead`; supported by a packed unembedding."""
        return self.head.largest(hidden) if isinstance(self.head, FindsLargest) else None

    def attention_maps(self, tokens: Tensor, layers: Sequence[int], source: Tensor | None = None) -> dict[int, Tensor]:
        """Cross-attention weights [heads, query, source] by block, of the sequence [tokens] over the source [source].

        Raises `InvalidValue` for a layer that does not exist, `Incompatible` for a mechanism without weights.
        """
        for layer in layers:
            if not 0 <= layer < len(self.decoder):
                raise InvalidValue.of("layers", layer, f"0 to {len(self.decoder) - 1}")
        if not self.chosen.mechanism.can(Capability.WEIGHTS):
            raise Incompatible(f"mechanism {self.mechanisms[0]!r} returns no attention weights")
        memory = self._read(None if source is None else source[None], None)
        hidden, maps = self._embed_tokens(tokens[None]), {}
        for index, block in enumerate(self._decoder()):
            if index in layers:
                maps[index] = block.weights(hidden, memory)[0]
            hidden = block(hidden, memory, None)
        return maps

    def _read(self, source: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
        given, _ = encoder_input_lengths(source, key_padding_mask, self.max_encoder_len)
        hidden = self._embed_source(given, torch.arange(given.shape[1], device=given.device))
        for block in self.encoder:
            hidden = block(hidden, key_padding_mask)
        normed: Tensor = self.encoder_norm(hidden)
        return normed

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{tokens.shape[1]} tokens", f"at most the context of {self.max_seq_len}")
        return self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))

    def _embed_source(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._embed(tokens, positions)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * math.sqrt(self.config.hidden_size)
        dropped: Tensor = self.dropout(hidden + sinusoidal(positions, self.config.hidden_size).to(hidden))
        return dropped

    def _decoder(self) -> Sequence[DecoderBlock]:
        return cast("Sequence[DecoderBlock]", self.decoder)
