"""T5: the encoder-decoder Transformer that encodes positions only by learned relative biases (Raffel et al. 2020,
arXiv 1910.10683)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import linear

from attn_models.attention import share_biases
from attn_models.decoder.layers import initialise
from attn_models.encoder_decoder.config import T5Config
from attn_models.encoder_decoder.transformer import Transformer


class T5(Transformer):
    """Pre-norm blocks without biases over unscaled token embeddings. All blocks of the encoder share one table of
    relative position biases, and so do all blocks of the decoder (section 2.1), but not in UMT5.

    T5 does not divide scores by √head_dim. Self-attention here does not either, but cross-attention does, so that the
    cross-attention queries of a checkpoint are multiplied by √head_dim when it is loaded.
    """

    output_layers: ClassVar[tuple[str, ...]] = ("unembedding",)
    """Names of the layers that map hidden states to logits."""

    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.unembedding: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.unembedding = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self.embedding, 1.0)
        if config.shared_biases:
            share_biases([block.attention for block in self.encoder])
            share_biases([block.attention for block in self.decoder])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        scaled = self._scaled(hidden)
        last = self.head if self.head is not None else self.unembedding
        logits: Tensor = linear(scaled, self.embedding.weight) if last is None else last(scaled)
        return logits

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.GreedyHead`; supported by a packed unembedding."""
        return super().greedy_tokens(self._scaled(hidden))

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.hidden_size**-0.5 if self.config.scale_output else hidden

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- distances alone are told
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded
