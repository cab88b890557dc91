"""The vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929, figure 1)."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.feedforward import build_feed_forward
from attn_models.decoder.initial import STANDARD
from attn_models.decoder.norms import build_norm
from attn_models.encoder_decoder.attention import encoder_attention
from attn_models.vision.config import VisionConfig


class VisionTransformer(nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos; blocks; y = LN(z_L^0) W: patches are the words of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.begin = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, config.patches + 1, config.width))
        self.blocks = nn.ModuleList(VisionBlock(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config.block)
        self.classifier = nn.Linear(config.width, config.classes)
        for weight in (self.begin, self.positions):
            nn.init.normal_(weight, std=STANDARD)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch, channels, side, side], floating point.

        Raises `InvalidValue` for images of another shape than the model's.
        """
        side, channels = self.config.image, self.config.channels
        if images.dim() != 4 or images.shape[1:] != (channels, side, side):
            allowed = f"[batch, {channels}, {side}, {side}]"
            raise InvalidValue.of("images", f"the shape {list(images.shape)}", allowed)
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.begin.expand(len(words), -1, -1), words], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.classifier(self.norm(hidden[:, 0]))
        return scores


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)) (equations 2 and 3)."""

    def __init__(self, config: VisionConfig, layer: int) -> None:
        super().__init__()
        chosen = encoder_attention(
            config.mechanism,
            config.options,
            width=config.width,
            heads=config.heads,
            bias=True,
            context=config.patches + 1,
            layer=layer,
        )
        # Any: what a mechanism builds is a module with the methods of AttentionLayer.
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.attention_norm = build_norm(config.block)
        self.feed_forward = build_feed_forward(config.block)
        self.feed_forward_norm = build_norm(config.block)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, patches + 1, width] to [batch, patches + 1, width]."""
        after = hidden + self.attention(self.attention_norm(hidden))
        out: Tensor = after + self.feed_forward(self.feed_forward_norm(after))
        return out
