"""Positions of an encoder's tokens, in its sequence or in its tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from attn_core.errors import InvalidValue
from attn_core.rotary import sinusoidal
from torch import Tensor, nn

from attn_models.encoder.config import EncoderConfig


class EveryPosition(nn.Embedding):
    """A row for each place of a sequence, padding included (Devlin et al. 2019)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.context, config.width)

    def rows(self, tokens: Tensor, keep: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Rows [tokens, width] for token ids [batch, tokens]."""
        found: Tensor = self(torch.arange(tokens.shape[1], device=tokens.device))
        return found


class RealPosition(nn.Embedding):
    """A row for each real token by its number among them, wherever padding stands (RoBERTa, Liu et al. 2019,
    arXiv 1907.11692, as its authors' code has it: real tokens begin at `first`, padding has the row before)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config.first_position + config.context, config.width)
        self.first = config.first_position

    def rows(self, tokens: Tensor, keep: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Rows [batch, tokens, width] for token ids [batch, tokens] and `keep` [batch, tokens], True where real."""
        real = torch.ones_like(tokens) if keep is None else keep.to(torch.int64)
        found: Tensor = self(real.cumsum(1) * real + self.first - 1)
        return found


class DepthPosition(nn.Module):
    """tanh(U PE(i) + W PE(δ_i)) for token i, δ_i steps below the root of its sentence's tree, PE sinusoids (Wang et al.
    2019, arXiv 1909.00383, section 3.1). Learned: `sequential` U and `structural` W."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.sequential = nn.Linear(config.width, config.width, bias=False)
        self.structural = nn.Linear(config.width, config.width, bias=False)

    def rows(self, tokens: Tensor, keep: Tensor | None, depths: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Rows [batch, tokens, width] for token ids and `depths` [batch, tokens], int64 from 0.

        Raises `InvalidValue` without depths, or for those of other tokens.
        """
        if depths is None or depths.shape != tokens.shape:
            given = "none" if depths is None else f"the shape {list(depths.shape)}"
            raise InvalidValue.of("depths", given, f"a depth of every token, {list(tokens.shape)}")
        width, like = self.sequential.in_features, self.sequential.weight
        order = sinusoidal(torch.arange(tokens.shape[1], device=tokens.device), width).to(like.dtype)
        tree = sinusoidal(depths, width).to(like.dtype)
        return torch.tanh(self.sequential(order) + self.structural(tree))


Position: TypeAlias = EveryPosition | RealPosition | DepthPosition

POSITIONS: Mapping[str, type[Position]] = {"every": EveryPosition, "real": RealPosition, "depth": DepthPosition}
