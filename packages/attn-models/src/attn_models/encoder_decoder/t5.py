"""T5: the encoder-decoder Transformer whose only positions are biases of distances (Raffel et al. 2020,
arXiv 1910.10683)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from attn_models.decoder.layers import initialise
from attn_models.encoder_decoder.config import T5Config
from attn_models.encoder_decoder.transformer import Transformer


class T5(Transformer):
    """Pre-norm blocks without biases over embeddings as they are; the first block's biases of distances serve all
    blocks of the encoder, and those of the decoder's first block all of the decoder (section 2.1).

    Scores of self-attention are not divided by √head_dim; those of cross-attention are, so that the queries of a
    checkpoint, which are not, are multiplied by it when they are read.
    """

    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.unembedding: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.unembedding = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self.embedding, 1.0)
        share_biases([block.attention for block in self.encoder])
        share_biases([block.attention for block in self.decoder])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden rows [..., width]."""
        scaled = self._scaled(hidden)
        last = self.head if self.head is not None else self.unembedding
        logits: Tensor = linear(scaled, self.embedding.weight) if last is None else last(scaled)
        return logits

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.GreedyHead`: a packed unembedding can tell."""
        return super().greedy_tokens(self._scaled(hidden))

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.hidden_size**-0.5 if self.config.scale_output else hidden

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- distances alone are told
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded


def share_biases(layers: Sequence[Any]) -> None:
    """Let all layers use the biases of the first."""
    for layer in layers[1:]:
        layer.modifiers = layers[0].modifiers
