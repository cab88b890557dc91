"""A vision-language decoder: SigLIP's tower, a connector that joins neighbouring patches, and a language model that
reads the result like token embeddings (Marafioti et al. 2025, SmolVLM, arXiv 2504.05299, section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attn_core.errors import InvalidValue
from attn_core.models import PlacedRows
from torch import Tensor, nn

from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import build_norm, initialise
from attn_models.encoder.encoder import PreNormBlock, require_images
from attn_models.vision_language.config import SiglipConfig, VisionDecoderConfig


def patch_positions(side: int) -> Tensor:
    """The position [side²] of each patch of a whole image, int64.

    The coordinate of a patch along a side is a fraction, which is bucketized by multiples of 1 / side. As in training,
    this is computed in float32, so that through rounding some neighbours have the same position.
    """
    cuts = torch.arange(1 / side, 1.0, 1 / side)
    places = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    along = torch.bucketize(places, cuts, right=True)
    return (along[:, None] * side + along).flatten()


class SiglipTower(nn.Module):
    """SigLIP's tower: pre-norm blocks over patches with learned positions, and a last norm (Zhai et al. 2023)."""

    def __init__(self, config: SiglipConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.hidden_size, config.patch, stride=config.patch)
        self.positions = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(PreNormBlock(config, layer) for layer in range(config.num_layers))
        self.norm: nn.Module = build_norm(config.block)
        initialise(self.positions)

    def forward(self, images: Tensor) -> Tensor:
        """Hidden states [images, patches, width] of images [images, channels, side, side], floating point.

        Raises `InvalidValue` for images of another shape than the tower's.
        """
        require_images(images, self.config.image, self.config.channels)
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = hidden + self.positions(patch_positions(self.config.side).to(images.device))
        for block in self.blocks:
            hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


TILES_AT_ONCE = 4
"""The number of image tiles that the vision tower processes in one batch."""


class VisionDecoder(Decoder):
    """A decoder with a vision tower. `image_rows` computes image embeddings before the prompt is run; inside `placing`
    they replace the embeddings of image tokens."""

    config: VisionDecoderConfig

    def __init__(self, config: VisionDecoderConfig) -> None:
        super().__init__(config)
        self.vision = SiglipTower(config.vision)
        joined = config.vision.hidden_size * config.scale_factor**2
        self.connector = nn.Linear(joined, config.hidden_size, bias=False)
        self.embedding_size = config.hidden_size
        self._placed: PlacedRows | None = None
        initialise(self.connector)

    def image_rows(self, images: Tensor) -> Tensor:
        """Image embeddings [images, tokens, hidden_size] of images [images, channels, side, side], floating point."""
        return torch.cat([self._rows_of(some) for some in torch.split(images, TILES_AT_ONCE)])

    def _rows_of(self, images: Tensor) -> Tensor:
        rows: Tensor = self.vision(images.to(self.connector.weight))
        cells, near = self.config.vision.side // self.config.scale_factor, self.config.scale_factor
        grid = rows.view(len(rows), cells, near, cells, near, -1).transpose(2, 3)
        joined: Tensor = self.connector(grid.reshape(len(rows), cells * cells, -1))
        return joined

    @contextmanager
    def seeing(self, tokens: Tensor, images: Tensor) -> Iterator[None]:
        """A context in which the embeddings of `images` are those of the image tokens of sequences [batch, tokens].

        `images` [batch, images, channels, side, side] are those of each sequence, as many as its image tokens stand
        for, and padding after them. Raises `InvalidValue` if there are too few.
        """
        shown = tokens == self.config.image_token_id
        if not bool(shown.any()):
            yield
            return
        tokens_of, each = shown.sum(1), self.config.tokens_per_tile
        counts = tokens_of // each
        if bool(((counts * each != tokens_of) | (counts > images.shape[1])).any()):
            allowed = f"an image for each {each} of the {tokens_of.tolist()} image tokens of the sequences"
            raise InvalidValue.of("images", f"{images.shape[1]} images", allowed)
        real = torch.arange(images.shape[1], device=images.device) < counts[:, None]
        rows = self.image_rows(images[real]).flatten(0, 1)
        with self.placing(PlacedRows(shown.flatten().nonzero().flatten(), rows)):
            yield

    @contextmanager
    def placing(self, placed: PlacedRows) -> Iterator[None]:
        """A context in which steps use these rows as the embeddings of some of their tokens."""
        self._placed = placed
        try:
            yield
        finally:
            self._placed = None

    def embed(self, tokens: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """See `Decoder.embed`; the rows of images replace those of their tokens."""
        hidden = super().embed(tokens, positions, longest)
        if self._placed is None:
            return hidden
        flat = hidden.flatten(0, -2).index_copy(0, self._placed.places, self._placed.rows.to(hidden))
        return flat.view(hidden.shape)
