"""ModernBERT: pre-norm blocks with gated feed-forwards, rotary positions, and windows in most layers."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import build_norm, initialise
from attn_models.encoder.config import ModernBertConfig
from attn_models.encoder.encoder import OF_HEADS, PreNormBlock, TextEncoder, share_among


class ModernBert(TextEncoder):
    """Normalised token embeddings, blocks with rotary positions and a last norm (Warner et al. 2024, arXiv 2412.13663).

    The attention of the first block has no norm before it, as the embeddings are normalised (section 2.1.1).
    """

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.size = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm: nn.Module = build_norm(config.block)
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.blocks[0].attention_norm = nn.Identity()
        self.norm: nn.Module = build_norm(config.block)
        initialise(self.embedding)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Hidden states [batch, tokens, width] of token ids [batch, tokens], int64.

        `key_padding_mask` [batch, tokens], bool, is True for real tokens; the outputs at padding are undefined. Raises
        `InvalidValue` for more tokens than the context.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")
        hidden: Tensor = self.embedding_norm(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden, key_padding_mask)
        normed: Tensor = self.norm(hidden)
        return normed


class ModernBertClassifier(nn.Module):
    """W norm(f(P c + p)) + b for each hidden state c or, with `pooling`, for the first of a text ("cls") or the mean
    ("mean")."""

    output_layers: ClassVar[tuple[str, ...]] = ("classifier",)
    """Names of the layers that map hidden states to logits."""

    def __init__(
        self, config: ModernBertConfig, classes: int, activation: str, pooling: Literal["cls", "mean"] | None
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.encoder = ModernBert(config)
        self.pooling = pooling
        self.head = nn.ModuleDict({"dense": nn.Linear(size, size), "norm": nn.LayerNorm(size, eps=config.norm_eps)})
        self.activation = OF_HEADS[activation]()
        self.classifier = nn.Linear(size, classes)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None, **_others: None) -> Tensor:
        """Logits [batch, 1, classes], or [batch, tokens, classes] without pooling; arguments are those of `ModernBert`,
        and others of encoders, which must be None."""
        rows = self.encoder(tokens, key_padding_mask)
        if self.pooling is not None:
            rows = self.weights(tokens, key_padding_mask)[:, None] @ rows
        scores: Tensor = self.classifier(self.head["norm"](self.activation(self.head["dense"](rows))))
        return scores

    def weights(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The weights [batch, tokens] of the hidden states of a text: all on the first, or equal ones."""
        real = torch.ones_like(tokens, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        if self.pooling == "cls":
            real = torch.zeros_like(real).index_fill(1, tokens.new_zeros(1), value=True)
        found = real.to(self.classifier.weight)
        return found / found.sum(1, keepdim=True).clamp(min=1)
