"""What a vision Transformer is made of, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_count
from attn_models.encoder.shape import EncoderShape


@dataclass(frozen=True, kw_only=True)
class VisionConfig(EncoderShape):
    """Square images of `image` pixels a side and `channels` numbers a pixel, cut into patches of `patch` pixels a side.

    `classes` are told apart. Raises `InvalidValue` for a field outside its range, and for patches that do not cover an
    image exactly.
    """

    image: int
    patch: int
    classes: int
    channels: int = 3
    norm_place: ClassVar[str] = "pre"
    noun: ClassVar[str] = "a vision Transformer"

    def __post_init__(self) -> None:
        for name in ("image", "patch", "classes", "channels"):
            require_count(name, getattr(self, name))
        if self.image % self.patch:
            raise InvalidValue.of("patch", self.patch, f"a divisor of the image's side of {self.image} pixels")
        super().__post_init__()

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.image // self.patch) ** 2

    @property
    def kinds(self) -> int:
        """Its classes."""
        return self.classes

    @property
    def places(self) -> int:
        """Its patches, and the row that is asked for the class."""
        return self.patches + 1
