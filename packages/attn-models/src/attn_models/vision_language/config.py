"""Configs of vision-language models. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig, Size
from attn_schema.schema import MAX_INT32, fields_of
from msgspec import Meta

from attn_models.encoder.config import EncoderShape


@dataclass(frozen=True, kw_only=True)
class SiglipConfig(EncoderShape):
    """SigLIP's vision tower (Zhai et al. 2023, arXiv 2303.15343): square images with sides of `image` pixels, split
    into patches with sides of `patch` pixels.

    Raises `InvalidValue` for a field outside its range, and for patches that do not divide the image.
    """

    image: Size
    patch: Size
    channels: Size = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise InvalidValue.of("patch", self.patch, f"a divisor of the image's side of {self.image} pixels")

    @property
    def side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image // self.patch

    @property
    def num_outputs(self) -> int:
        """The size of the output of a patch, as the tower has neither a vocabulary nor classes."""
        return self.hidden_size

    @property
    def sequence_length(self) -> int:
        """The number of patches of an image."""
        return self.side**2


@dataclass(frozen=True, kw_only=True)
class VisionDecoderConfig(DecoderConfig):
    """A decoder with images in its prompts: outputs of the tower `vision` replace the embeddings of `image_token_id`.

    `scale_factor`² neighbouring patches are joined to one embedding. Raises `InvalidValue` for a field outside its
    range.
    """

    vision: SiglipConfig
    image_token_id: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    scale_factor: Size = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision.side % self.scale_factor:
            allowed = f"a divisor of the {self.vision.side} patches along a side"
            raise InvalidValue.of("scale_factor", self.scale_factor, allowed)
        if self.image_token_id >= self.vocab_size:
            raise InvalidValue.of("image_token_id", self.image_token_id, f"a token id from 0 to {self.vocab_size - 1}")

    @classmethod
    def of(cls, text: DecoderConfig, vision: SiglipConfig, image_token_id: int, scale_factor: int) -> Self:
        """The config that adds a vision tower to the decoder `text`."""
        return cls(**_fields(text), vision=vision, image_token_id=image_token_id, scale_factor=scale_factor)

    @property
    def text(self) -> DecoderConfig:
        """The config of the decoder without the vision tower."""
        return DecoderConfig(**_fields(self))

    @property
    def tokens_per_tile(self) -> int:
        """The number of tokens in a prompt that one input image of the tower takes."""
        return (self.vision.side // self.scale_factor) ** 2


def _fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a decoder's config, without those of a subclass."""
    return {info.name: getattr(config, info.name) for info in fields_of(DecoderConfig)}
