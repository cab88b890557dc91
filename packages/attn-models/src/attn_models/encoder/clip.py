"""CLIP: a tower for texts and one for images, whose vectors are near where they mean the same (Radford et al. 2021,
arXiv 2103.00020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import STANDARD, build_norm, initialise
from attn_models.encoder.config import ACTIVATIONS, EncoderShape
from attn_models.encoder.encoder import PreNormBlock, share_among
from attn_models.plain_config import require_count

CLIP_ACTIVATIONS = (*ACTIVATIONS, "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class ClipTextConfig(EncoderShape):
    """The tower of texts: causal pre-norm blocks over token and position embeddings, projected to `size` elements.

    `end_id` is the token that ends a text, whose row is the text's. Raises `InvalidValue` for a field outside its
    range.
    """

    vocab_size: int
    max_seq_len: int
    size: int
    end_id: int
    norm_place: ClassVar[str] = "pre"
    causal: ClassVar[bool] = True
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS
    noun: ClassVar[str] = "a CLIP of texts"

    def __post_init__(self) -> None:
        require_count("size", self.size)
        if type(self.end_id) is not int or not 0 <= self.end_id < self.vocab_size:
            raise InvalidValue.of("end_id", self.end_id, f"0 to {self.vocab_size - 1}, a token")
        super().__post_init__()

    @property
    def kinds(self) -> int:
        """The size of the vocabulary."""
        return self.vocab_size

    @property
    def places(self) -> int:
        """The longest sequence, in tokens."""
        return self.max_seq_len


@dataclass(frozen=True, kw_only=True)
class ClipImageConfig(EncoderShape):
    """The tower of images, as `VisionConfig`, projected to `size` elements instead of classified."""

    image: int
    patch: int
    size: int
    channels: int = 3
    norm_place: ClassVar[str] = "pre"
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS
    noun: ClassVar[str] = "a CLIP of images"

    def __post_init__(self) -> None:
        for name in ("image", "patch", "size", "channels"):
            require_count(name, getattr(self, name))
        if self.patch > self.image:
            raise InvalidValue.of("patch", self.patch, f"at most the image's side of {self.image} pixels")
        super().__post_init__()

    @property
    def kinds(self) -> int:
        """The elements of a vector."""
        return self.size

    @property
    def places(self) -> int:
        """The patches and the class token."""
        return (self.image // self.patch) ** 2 + 1


class ClipText(nn.Module):
    """Rows of a text's tokens, projected; the row of the token that ends it, and every one behind, is the text's."""

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
        """Rows [batch, tokens, size] of token ids [batch, tokens], int64.

        Padding, which stands at the end, is seen by no token before it, so that a mask changes nothing. Raises
        `InvalidValue` for more tokens than the context, and for a text without the token that ends it.
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
            raise InvalidValue.of("tokens", "a text without its end", f"the token {self.config.end_id} in each text")
        first = (~ended).sum(-1, keepdim=True)
        return rows.gather(1, torch.where(ended, first, places)[..., None].expand_as(rows))


class ClipImage(nn.Module):
    """The vector of an image: the row of a class token over its patches, normed and projected."""

    def __init__(self, config: ClipImageConfig) -> None:
        super().__init__()
        self.config = config
        self.size = config.size
        self.patches = nn.Conv2d(config.channels, config.hidden_size, config.patch, stride=config.patch, bias=False)
        self.begin = nn.Parameter(torch.empty(config.hidden_size))
        self.positions = nn.Embedding(config.places, config.hidden_size)
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
        side, channels = self.config.image, self.config.channels
        if images.dim() != 4 or images.shape[1:] != (channels, side, side):
            allowed = f"[batch, {channels}, {side}, {side}]"
            raise InvalidValue.of("images", f"the shape {list(images.shape)}", allowed)
        words = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.begin.expand(len(words), 1, -1), words], dim=1) + self.positions.weight
        hidden = self.embedding_norm(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        vectors: Tensor = self.projection(self.norm(hidden[:, 0]))
        return vectors
