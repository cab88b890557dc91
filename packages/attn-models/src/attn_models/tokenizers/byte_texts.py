"""Texts of tokens that stand for bytes, joined here: for the few tokens of a stream that is sooner than the library."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tokenizers
from tokenizers import decoders

from attn_models.tokenizers.byte_alphabet import byte_of_character


class ByteTexts(dict[int, bytes]):
    """The bytes that each token adds to a text, none for the `skipped` ones; known once they were asked for."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, skipped: Collection[int]) -> ByteTexts | None:
        """None where the library does not decode bytes alone."""
        return cls(backend, skipped) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def text(self, ids: Sequence[int]) -> str:
        """What the library decodes `ids` to. Raises `KeyError` for an id without a token."""
        return b"".join([self[token_id] for token_id in ids]).decode("utf-8", errors="replace")

    def __missing__(self, token_id: int) -> bytes:
        spelled = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if spelled is None:
            raise KeyError(token_id)
        alphabet = byte_of_character()
        known = all(character in alphabet for character in spelled)
        # A token that was added may be spelled in other characters: the library takes all of them as they are.
        found = bytes(alphabet[c] for c in spelled) if known else spelled.encode("utf-8")
        self[token_id] = found
        return found
