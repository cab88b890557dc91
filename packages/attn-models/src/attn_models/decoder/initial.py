"""Weights at the start of training."""

from __future__ import annotations

import math
import re

from torch import nn

from attn_models.decoder.attention import LayerAttention

STANDARD = 0.02
INTO_RESIDUAL = re.compile(r"attention\.output|feed_forward(\.experts\.\d+|\.shared)?\.down")


def initialise_block(block: nn.Module, attention: LayerAttention, layers: int) -> None:
    """As `initialise`, what writes into the residual stream scaled by 1/√(2 layers) (section 2.3 there).

    A mechanism that computes its own way keeps the weights that its maker gave it.
    """
    own = attention.mechanism.spec(attention.config) is None
    for name, module in block.named_modules():
        if not (own and name.startswith("attention.")):
            initialise(module, STANDARD / math.sqrt(2 * layers) if INTO_RESIDUAL.fullmatch(name) else STANDARD)


def initialise(module: nn.Module, deviation: float = STANDARD) -> None:
    """Normal weights of a linear layer or embedding, zero biases, as GPT-2 (Radford et al. 2019); others are left."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
