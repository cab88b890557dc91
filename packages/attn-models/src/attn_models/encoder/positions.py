"""Learned positions of an encoder's tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attn_models.encoder.config import EncoderConfig


class EveryPosition(nn.Embedding):
    """A row for each place of a sequence, padding included (Devlin et al. 2019)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.context, config.width)

    def rows(self, tokens: Tensor, keep: Tensor | None) -> Tensor:  # noqa: ARG002  (those of `RealPosition`)
        """Rows [tokens, width] for token ids [batch, tokens]."""
        found: Tensor = self(torch.arange(tokens.shape[1], device=tokens.device))
        return found


class RealPosition(nn.Embedding):
    """A row for each real token by its number among them, wherever padding stands (RoBERTa, Liu et al. 2019,
    arXiv 1907.11692, as its authors' code has it: real tokens begin at `first`, padding has the row before)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.first_position + config.context, config.width)
        self.first = config.first_position

    def rows(self, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Rows [batch, tokens, width] for token ids [batch, tokens] and `keep` [batch, tokens], True where real."""
        real = torch.ones_like(tokens) if keep is None else keep.to(torch.int64)
        found: Tensor = self(real.cumsum(1) * real + self.first - 1)
        return found


POSITIONS: Mapping[str, type[EveryPosition] | type[RealPosition]] = {"every": EveryPosition, "real": RealPosition}
