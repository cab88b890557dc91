"""Looking characters up in an array, for vocabularies of one token a character."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attn_core.errors import InvalidValue
from numpy.typing import NDArray

_ABSENT = -1


class CharacterTable:
    """The ids of single characters, by code point."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._ids = np.full(max(map(ord, vocabulary)) + 1, _ABSENT, dtype=np.int32)
        for character, token_id in vocabulary.items():
            self._ids[ord(character)] = token_id

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids of `text` [characters], int32. Raises InvalidValue naming the first unknown character."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[np.minimum(points, len(self._ids) - 1)]
        unknown = np.flatnonzero((ids == _ABSENT) | (points >= len(self._ids)))
        if unknown.size:
            place = int(unknown[0])
            allowed = f"the {int((self._ids != _ABSENT).sum())} characters of the vocabulary"
            raise InvalidValue.of(f"text[{place}]", text[place], allowed)
        return ids
