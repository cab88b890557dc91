"""What an encoder is made of, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import plain_fields, require_count, require_word
from attn_models.decoder.config import AttentionChoice
from attn_models.encoder.shape import EncoderShape


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderShape):
    """Blocks over token, position and segment embeddings (BERT's shape).

    `segments` is the number of kinds of sentence that an input may hold. `positions` "every" numbers all places of a
    sequence from 0 (BERT), "real" only real tokens, from `first_position` (RoBERTa). Raises `InvalidValue` for a field
    outside its range.
    """

    vocabulary: int
    context: int
    segments: int = 2
    positions: str = "every"
    first_position: int = 0
    norm_place: ClassVar[str] = "post"

    def __post_init__(self) -> None:
        require_count("segments", self.segments)
        require_word("positions", self.positions, ("every", "real"))
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

    def plain(self) -> dict[str, Any]:
        """The config as plain values, which `from_plain` turns back."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        choices = [{"mechanism": choice.mechanism, "options": dict(choice.options)} for choice in self.pattern]
        return values | {"options": dict(self.options), "pattern": choices}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> EncoderConfig:
        """The config of plain values, such as JSON's, whose whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        plain = plain_fields(cls, values, "an encoder")
        pattern = tuple(AttentionChoice.from_plain(item) for item in plain.get("pattern") or ())
        return cls(**plain | {"pattern": pattern})
