"""CLIP: a text tower and an image tower that map matching texts and images to nearby vectors (Radford et al. 2021,
arXiv 2103.00020)."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import STANDARD, build_norm, initialise
from attn_models.encoder.config import ClipImageConfig, ClipTextConfig
from attn_models.encoder.encoder import PreNormBlock, require_images, share_among


class ClipText(nn.Module):
    """The text tower. It returns a projected vector for each token; that of the end token represents the text, and is
    repeated for all tokens after it."""

    def __init__(self, config: ClipTextConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.size = config.size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_size)
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm: nn.Module = build_norm(config.block)
        self.projection = nn.Linear(config.hidden_size, config.size, bias=False)
        for module in (self.embedding, self.positions, self.projection):
            initialise(module)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Vectors [batch, tokens, size] of token ids [batch, tokens], int64.

        The mask is not used: attention is causal and padding is at the end, so no real token attends to it. Raises
        `InvalidValue` for more tokens than the context, and for a text without the end token.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")
        hidden = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        rows: Tensor = self.projection(self.norm(hidden))
        ended = (tokens == self.config.end_id).cumsum(-1) > 0
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        if not bool(ended.any(-1).all()):
            raise InvalidValue.of(
                "tokens", "a text without an end token", f"the token {self.config.end_id} in each text"
            )
        first = (~ended).sum(-1, keepdim=True)
        return rows.gather(1, torch.where(ended, first, places)[..., None].expand_as(rows))


class ClipImage(nn.Module):
    """The image tower. It returns the normalised and projected output of a class token that attends to the patches."""

    def __init__(self, config: ClipImageConfig) -> None:
        super().__init__()
        self.config = config
        self.size = config.size
        self.patches = nn.Conv2d(config.channels, config.hidden_size, config.patch, stride=config.patch, bias=False)
        self.begin = nn.Parameter(torch.empty(config.hidden_size))
        self.positions = nn.Embedding(config.sequence_length, config.hidden_size)
        self.embedding_norm: nn.Module = build_norm(config.block)
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm: nn.Module = build_norm(config.block)
        self.projection = nn.Linear(config.hidden_size, config.size, bias=False)
        nn.init.normal_(self.begin, std=STANDARD)
        for module in (self.positions, self.projection):
            initialise(module)

    def forward(self, images: Tensor) -> Tensor:
        """Vectors [batch, size] of images [batch, channels, side, side], floating point.

        Raises `InvalidValue` for images of another shape than the model's.
        """
        require_images(images, self.config.image, self.config.channels)
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.begin.expand(len(words), 1, -1), words], dim=1) + self.positions.weight
        hidden = self.embedding_norm(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        vectors: Tensor = self.projection(self.norm(hidden[:, 0]))
        return vectors
