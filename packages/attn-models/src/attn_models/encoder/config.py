"""What an encoder is made of, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_count, require_word
from attn_models.encoder.shape import EncoderShape


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderShape):
    """Blocks over token, position and segment embeddings (BERT's shape).

    `segments` is the number of kinds of sentence that an input may hold. `positions` "every" numbers all places of a
    sequence from 0 (BERT), "real" only real tokens, from `first_position` (RoBERTa), "depth" fuses places with depths
    in a tree, which must then be given with the tokens. Raises `InvalidValue` for a field outside its range.
    """

    vocabulary: int
    context: int
    segments: int = 2
    positions: str = "every"
    first_position: int = 0
    norm_place: ClassVar[str] = "post"
    noun: ClassVar[str] = "an encoder"

    def __post_init__(self) -> None:
        require_count("segments", self.segments)
        require_word("positions", self.positions, ("every", "real", "depth"))
        first = self.first_position
        if type(first) is not int or first < 0 or (self.positions == "real") != (first > 0):
            allowed = "a whole number from 1 where positions are 'real', else 0"
            raise InvalidValue.of("first_position", self.first_position, allowed)
        super().__post_init__()

    @property
    def kinds(self) -> int:
        """Its tokens."""
        return self.vocabulary

    @property
    def places(self) -> int:
        """Its context."""
        return self.context
