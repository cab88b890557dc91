"""The Transformer of Vaswani et al. (2017, arXiv 1706.03762): encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from attn_core import Capability, Fields, RaggedBatch
from attn_core.batch import ModelState
from attn_core.errors import Incompatible, InvalidValue
from attn_core.models import FindsLargest
from attn_core.rotary import sinusoidal
from attn_core.stores import ModelSpecs
from torch import Tensor, nn

from attn_models.decoder.initial import initialise
from attn_models.decoder.norms import build_norm
from attn_models.encoder_decoder.attention import cross_attention, decoder_attention, encoder_attention
from attn_models.encoder_decoder.sources import source_lengths
from attn_models.encoder_decoder.transformer_blocks import DecoderBlock, EncoderBlock
from attn_models.encoder_decoder.transformer_config import TransformerConfig


class Transformer(nn.Module):
    """Implements `attn_core.models.SourceModel`. Source, target and unembedding share one table (section 3.4)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"width": config.width, "heads": config.heads, "dropout": config.attention_dropout}
        longest, source = sizes | {"context": config.context}, sizes | {"context": config.source_context}
        reads = [
            encoder_attention(config.encoder, config.encoder_options, layer=layer, **source)
            for layer in range(config.layers)
        ]
        writes = decoder_attention(config.decoder, config.decoder_options, **longest)
        self.chosen = cross_attention(config.cross, config.cross_options, **source)
        self.config = config
        self.vocabulary = config.vocabulary
        self.context, self.source_context = config.context, config.source_context
        # Any: a StoredEmbedding where weights are packed.
        self.embedding: Any = nn.Embedding(config.vocabulary, config.width)
        self.head: Any = None
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(config, each) for each in reads)
        self.decoder = nn.ModuleList(DecoderBlock(config, writes, self.chosen) for _ in range(config.layers))
        pre = config.norm_place == "pre"
        self.encoder_norm: nn.Module = build_norm(config.block) if pre else nn.Identity()
        self.decoder_norm: nn.Module = build_norm(config.block) if pre else nn.Identity()
        # Multiplied by √width they then stand beside waves of their own size.
        initialise(self.embedding, config.width**-0.5)
        self._specs = {f"decoder.{i}": writes.states for i in range(config.layers)}
        self._specs |= {f"cross.{i}": self.chosen.states for i in range(config.layers)}
        self._mechanisms = {f"decoder.{i}": writes.mechanism.name for i in range(config.layers)}
        self._mechanisms |= {f"cross.{i}": self.chosen.mechanism.name for i in range(config.layers)}

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each attention to the source."""
        return (self.chosen.mechanism.name,) * len(self.decoder)

    def forward(self, tokens: Tensor, source: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of tokens [batch, tokens] over sources [batch, source]."""
        memory = self._read(source, keep)
        hidden = self._written(tokens)
        for block in self._decoder():
            hidden = block(hidden, memory, keep)
        return self.logits(self.decoder_norm(hidden))

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """What each block's attention reads of the source [source]."""
        memory = self._read(source[None], None)[0]
        return {f"cross.{i}": block.cross.encode(memory) for i, block in enumerate(self._decoder())}

    def state_specs(self) -> ModelSpecs:
        """What every block must remember of what is written, and of the source."""
        return self._specs

    def layer_mechanisms(self) -> Mapping[str, str]:
        """What attends to what is written and to the source in each block, by layer name."""
        return self._mechanisms

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden rows [tokens, width] of the new tokens [tokens] of many requests."""
        hidden = self._embed(tokens, batch.positions)
        for i, block in enumerate(self._decoder()):
            hidden = block.step(hidden, batch, state[f"decoder.{i}"], state[f"cross.{i}"])
        normed: Tensor = self.decoder_norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden rows [..., width]."""
        if self.head is not None:
            logits: Tensor = self.head(hidden)
            return logits
        return nn.functional.linear(hidden, self.embedding.weight)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.FindsLikeliest`: a packed unembedding can tell."""
        return self.head.largest(hidden) if isinstance(self.head, FindsLargest) else None

    def attention_maps(self, tokens: Tensor, layers: Sequence[int], source: Tensor | None = None) -> dict[int, Tensor]:
        """Weights [heads, query, source] by block of the sequence [tokens] over the source [source].

        Raises `InvalidValue` for a layer that does not exist, `Incompatible` for a mechanism without weights.
        """
        for layer in layers:
            if not 0 <= layer < len(self.decoder):
                raise InvalidValue.of("layers", layer, f"0 to {len(self.decoder) - 1}")
        if not self.chosen.mechanism.can(Capability.WEIGHTS):
            raise Incompatible(f"mechanism {self.mechanisms[0]!r} returns no attention weights")
        memory = self._read(None if source is None else source[None], None)
        hidden, maps = self._written(tokens[None]), {}
        for index, block in enumerate(self._decoder()):
            if index in layers:
                maps[index] = block.weights(hidden, memory)[0]
            hidden = block(hidden, memory, None)
        return maps

    def _read(self, source: Tensor | None, keep: Tensor | None) -> Tensor:
        given, _ = source_lengths(source, keep, self.source_context)
        hidden = self._embed(given, torch.arange(given.shape[1], device=given.device))
        for block in self.encoder:
            hidden = block(hidden, keep)
        normed: Tensor = self.encoder_norm(hidden)
        return normed

    def _written(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.context:
            raise InvalidValue.of("tokens", f"{tokens.shape[1]} tokens", f"at most the context of {self.context}")
        return self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * math.sqrt(self.config.width)
        dropped: Tensor = self.dropout(hidden + sinusoidal(positions, self.config.width).to(hidden.dtype))
        return dropped

    def _decoder(self) -> Sequence[DecoderBlock]:
        return cast("Sequence[DecoderBlock]", self.decoder)
