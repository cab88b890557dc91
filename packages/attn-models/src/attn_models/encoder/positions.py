"""Learned positions of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from attn_core.errors import InvalidValue
from attn_core.rotary import sinusoidal
from torch import Tensor, nn

from attn_models.encoder.config import EncoderConfig


class EveryPosition(nn.Embedding):
    """Learned position embeddings that count all tokens of a sequence, padding included (Devlin et al. 2019)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.max_seq_len, config.embedding_width)

    def rows(self, tokens: Tensor, key_padding_mask: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Position embeddings [tokens, width] for token ids [batch, tokens]."""
        found: Tensor = self(torch.arange(tokens.shape[1], device=tokens.device))
        return found


class RealPosition(nn.Embedding):
    """Learned position embeddings that count only real tokens (RoBERTa, Liu et al. 2019, arXiv 1907.11692). As in the
    authors' code, positions of real tokens start at `first`; `first` - 1 is the position and token id of padding."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.first_position + config.max_seq_len, config.embedding_width)
        self.first = config.first_position

    def rows(self, tokens: Tensor, key_padding_mask: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Position embeddings [batch, tokens, width] for token ids [batch, tokens] and `key_padding_mask` [batch,
        tokens], True for real tokens.
        """
        real = (tokens != self.first - 1).to(torch.int64)
        if key_padding_mask is not None:
            real = real * key_padding_mask
        found: Tensor = self(real.cumsum(1) * real + self.first - 1)
        return found


class DepthPosition(nn.Module):
    """tanh(U PE(i) + W PE(δ_i)) for token i at depth δ_i of its dependency tree, PE sinusoids (Wang et al.
    2019, arXiv 1909.00383, section 3.1). Learned: `sequential` U and `structural` W."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.sequential = nn.Linear(config.embedding_width, config.embedding_width, bias=False)
        self.structural = nn.Linear(config.embedding_width, config.embedding_width, bias=False)

    def rows(self, tokens: Tensor, key_padding_mask: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Position embeddings [batch, tokens, width] for token ids and `depths` [batch, tokens], int64 from 0.

        Raises `InvalidValue` if `depths` is None or has another shape than `tokens`.
        """
        if depths is None or depths.shape != tokens.shape:
            given = "none" if depths is None else f"the shape {list(depths.shape)}"
            raise InvalidValue.of("depths", given, f"a depth of every token, {list(tokens.shape)}")
        width, like = self.sequential.in_features, self.sequential.weight
        order = sinusoidal(torch.arange(tokens.shape[1], device=tokens.device), width).to(like)
        tree = sinusoidal(depths, width).to(like)
        return torch.tanh(self.sequential(order) + self.structural(tree))


Position: TypeAlias = EveryPosition | RealPosition | DepthPosition

POSITIONS: Mapping[str, type[Position]] = {"every": EveryPosition, "real": RealPosition, "depth": DepthPosition}
