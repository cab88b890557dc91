"""The vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929, figure 1)."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import STANDARD, build_norm
from attn_models.encoder.config import VisionConfig
from attn_models.encoder.encoder import PreNormBlock


class VisionTransformer(nn.Module):
    """z_0 = [x_class; x_1 E; ...; x_N E] + E_pos; blocks; y = LN(z_L^0) W: patches are the words of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.hidden_size, config.patch, stride=config.patch)
        self.begin = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.positions = nn.Parameter(torch.empty(1, config.places, config.hidden_size))
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        self.norm = build_norm(config.block)
        self.classifier = nn.Linear(config.hidden_size, config.classes)
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
