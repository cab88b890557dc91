"""What an encoder is made of, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_models.decoder.checks import require_count
from attn_models.encoder.shape import EncoderShape


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderShape):
    """Blocks over token, position and segment embeddings (BERT's shape).

    `segments` is the number of kinds of sentence that an input may hold. Raises `InvalidValue` for a field outside its
    range.
    """

    vocabulary: int
    context: int
    segments: int = 2
    norm_place: ClassVar[str] = "post"

    def __post_init__(self) -> None:
        require_count("segments", self.segments)
        super().__post_init__()

    @property
    def kinds(self) -> int:
        """Its tokens."""
        return self.vocabulary

    @property
    def places(self) -> int:
        """Its context."""
        return self.context
