"""CLIP: a text tower and an image tower that map matching texts and images to nearby vectors (Radford et al. 2021,
arXiv 2103.00020); those of SigLIP, and the image tower of DINOv2."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from attn_models.attention import cross_attention
from attn_models.decoder.layers import STANDARD, build_feed_forward, build_norm, initialise
from attn_models.encoder.config import ClipTextConfig, EncoderShape, ImageEncoderConfig, SiglipTextConfig
from attn_models.encoder.encoder import PreNormBlock, require_images, share_among


class TextTower(nn.Module):
    """Blocks over token and position embeddings, and a projection of their outputs."""

    projection_bias: ClassVar[bool] = False

    def __init__(self, config: ClipTextConfig | SiglipTextConfig) -> None:
        super().__init__()
        self.max_seq_len = config.max_seq_len
        self.size = config.size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_size)
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm: nn.Module = build_norm(config.block)
        self.projection = nn.Linear(config.hidden_size, config.size, bias=self.projection_bias)
        for module in (self.embedding, self.positions, self.projection):
            initialise(module)

    def through_blocks(self, hidden: Tensor) -> Tensor:
        """What leaves the last block, for embeddings [batch, tokens, width]."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def require_context(self, length: int) -> None:
        """Raise `InvalidValue` for more tokens than the context."""
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")


class ClipText(TextTower):
    """The text tower. It returns a projected vector for each token; that of the end token represents the text, and is
    repeated for all tokens after it."""

    def __init__(self, config: ClipTextConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Vectors [batch, tokens, size] of token ids [batch, tokens], int64.

        The mask is not used: attention is causal and padding is at the end, so no real token attends to it. Raises
        `InvalidValue` for more tokens than the context, and for a text without the end token.
        """
        length = tokens.shape[1]
        self.require_context(length)
        hidden = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        rows: Tensor = self.projection(self.norm(self.through_blocks(hidden)))
        ended = (tokens == self.config.end_id).cumsum(-1) > 0
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        if not bool(ended.any(-1).all()):
            raise InvalidValue.of(
                "tokens", "a text without an end token", f"the token {self.config.end_id} in each text"
            )
        first = (~ended).sum(-1, keepdim=True)
        return rows.gather(1, torch.where(ended, first, places)[..., None].expand_as(rows))


class SiglipText(TextTower):
    """SigLIP's text tower (Zhai et al. 2023, arXiv 2303.15343), whose vector of a text is repeated for all its tokens.

    A text is padded to the whole context, and the output of the last token, mostly padding, represents it.
    """

    projection_bias = True

    def __init__(self, config: SiglipTextConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Vectors [batch, tokens, size] of token ids [batch, tokens], int64, where `key_padding_mask` [batch, tokens]
        is True, or all; raises `InvalidValue` for more tokens than the context."""
        length = tokens.shape[1]
        self.require_context(length)
        if key_padding_mask is not None:
            tokens = tokens.masked_fill(~key_padding_mask, self.config.pad_id)
        padded = pad(tokens, (0, self.max_seq_len - length), value=self.config.pad_id)
        hidden = self.through_blocks(self.embedding(padded) + self.positions.weight)
        vectors: Tensor = self.projection(self.norm(hidden[:, -1:]))
        return vectors.expand(-1, length, -1)


class ScaledBlock(PreNormBlock):
    """x + s attention(norm(x)), then x + t feed-forward(norm(x)), for learned vectors s and t (Touvron et al. 2021,
    arXiv 2103.17239)."""

    def __init__(self, config: EncoderShape, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.feed_forward_scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `PostNormBlock.forward`."""
        attended = self.attention(self.attention_norm(hidden), key_padding_mask=key_padding_mask)
        after = hidden + self.attention_scale * attended
        out: Tensor = after + self.feed_forward_scale * self.feed_forward(self.feed_forward_norm(after))
        return out


class AttentionPool(nn.Module):
    """y + feed-forward(norm(y)) for the attention y of a learned query to rows (Zhai et al. 2022, arXiv 2106.04560)."""

    def __init__(self, config: EncoderShape) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, config.hidden_size) * STANDARD)
        own = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, "bias": True}
        chosen = cross_attention("attn-variants/mha", {}, **own)
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.norm: nn.Module = build_norm(config.block)
        self.feed_forward: nn.Module = build_feed_forward(config.block)

    def forward(self, rows: Tensor) -> Tensor:
        """The vector [batch, width] of rows [batch, rows, width]."""
        found = self.attention(self.query.expand(len(rows), -1, -1), rows)[:, 0]
        out: Tensor = found + self.feed_forward(self.norm(found))
        return out


class ClipImage(nn.Module):
    """An image tower: blocks over patches, and one vector of an image, projected if the config says so: the output of
    a class token that attends to the patches, or that of an `AttentionPool`."""

    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.size, width = config.num_outputs, config.hidden_size
        self.patches = nn.Conv2d(config.channels, width, config.patch, stride=config.patch, bias=config.patch_bias)
        self.begin = nn.Parameter(torch.randn(width) * STANDARD) if config.class_token else None
        self.positions = nn.Embedding(config.sequence_length, width)
        self.embedding_norm: nn.Module = build_norm(config.block) if config.embedding_norm else nn.Identity()
        block = ScaledBlock if config.layer_scale else PreNormBlock
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.num_layers))
        share_among(config, self.blocks)
        self.norm: nn.Module = build_norm(config.block)
        self.pool = None if config.class_token else AttentionPool(config)
        self.projection: nn.Module = nn.Linear(width, config.size, bias=False) if config.size else nn.Identity()
        for module in (self.positions, self.projection):
            initialise(module)

    def forward(self, images: Tensor) -> Tensor:
        """Vectors [batch, size] of images [batch, channels, height, width], floating point.

        Raises `InvalidValue` for images of another shape than the model's, unless it resizes its table of positions.
        """
        if not self.config.interpolate:
            require_images(images, self.config.image, self.config.channels)
        words = self.patches(images)
        table = self._positions(words.shape[-2], words.shape[-1])
        words = words.flatten(2).transpose(1, 2)
        if self.begin is not None:
            words = torch.cat([self.begin.expand(len(words), 1, -1), words], dim=1)
        hidden = self.embedding_norm(words + table)
        for block in self.blocks:
            hidden = block(hidden)
        pooled = self.norm(hidden[:, 0]) if self.pool is None else self.pool(self.norm(hidden))
        vectors: Tensor = self.projection(pooled)
        return vectors

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The table [positions, width] for so many rows and columns of patches, resized in float32 as that of DINOv2
        in transformers is."""
        table, side = self.positions.weight, self.config.side
        if (rows, columns) == (side, side):
            return table
        first, grid = table[: self.config.class_token], table[self.config.class_token :]
        grid = grid.reshape(side, side, -1).permute(2, 0, 1)[None].float()
        grid = interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False).to(table.dtype)
        return torch.cat([first, grid[0].flatten(1).T])
