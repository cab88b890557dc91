"""Helpers for tokenizers: byte-level alphabets, fast paths for bytes and characters, and errors of the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from attn_core.errors import AttnError, CheckpointInvalid, InvalidValue
from numpy.typing import NDArray
from tokenizers import decoders

BLANK = "\u2581"
"""The character that SentencePiece writes for a space."""


@cache
def byte_of_character() -> dict[str, int]:
    """The byte that each of the 256 characters of the byte-level alphabet represents.

    Printable Latin-1 bytes are represented by themselves, the others, in order, by characters from U+0100
    (GPT-2, Radford et al. 2019).
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    spelled = {chr(byte): byte for byte in themselves}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class ByteDecoder(dict[int, bytes]):
    """The bytes that each token adds to a text, none for the `skipped` ones; computed on first use and cached."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Collection[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, skipped: Collection[int]) -> ByteDecoder | None:
        """A decoder for a byte-level tokenizer; None for others."""
        return cls(backend, skipped) if isinstance(backend.decoder, decoders.ByteLevel) else None

    def text(self, ids: Sequence[int]) -> str:
        """The text that the library would decode `ids` to. Raises `KeyError` for an id without a token."""
        return b"".join([self[token_id] for token_id in ids]).decode("utf-8", errors="replace")

    def __missing__(self, token_id: int) -> bytes:
        spelled = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if spelled is None:
            raise KeyError(token_id)
        alphabet = byte_of_character()
        known = all(character in alphabet for character in spelled)
        # An added token may contain other characters; then the library takes its whole spelling literally.
        found = bytes(alphabet[c] for c in spelled) if known else spelled.encode("utf-8")
        self[token_id] = found
        return found


def ranked_merges(ranked: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose union is a token, in the order of the unions in `ranked`, then of the pairs' ids."""
    for token in ranked:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in cuts if pair[0] in ranked and pair[1] in ranked]
        yield from sorted(known, key=lambda pair: (ranked[pair[0]], ranked[pair[1]]))


def within_rows(backend: tokenizers.Tokenizer, rows: int, path: Path) -> tuple[tokenizers.Tokenizer, tuple[str, ...]]:
    """The tokenizer of the file `path` for a model whose embedding has `rows` rows, and a remark on what is left out.

    As in llama.cpp, added tokens without a row are left out: text models of Gemma 3 have the token of the images that
    others of the family read. Raises `CheckpointInvalid` if other tokens are without a row.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    beyond = sorted((place, token) for token, place in vocabulary.items() if place >= rows)
    if not beyond:
        return backend, ()
    if any(place >= rows for place in backend.get_vocab(with_added_tokens=False).values()):
        rule = f"the tokenizer has {beyond[-1][0] + 1} tokens, but the embedding only {rows} rows"
        raise CheckpointInvalid.of(path, rule)
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < rows]
    with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"its added tokens need more than {rows} rows: {said}")):
        kept = tokenizers.Tokenizer.from_str(json.dumps(described))
    names = ", ".join(repr(token) for _, token in beyond[:3])
    return kept, (f"left out, as the embedding has only {rows} rows: {names}{', ...' if len(beyond) > 3 else ''}",)


_ABSENT = -1


class CharacterTable:
    """The ids of single characters, by code point."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._ids = np.full(max(map(ord, vocabulary)) + 1, _ABSENT, dtype=np.int32)
        for character, token_id in vocabulary.items():
            self._ids[ord(character)] = token_id

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids of `text` [characters], int32. Raises `InvalidValue`, naming the first unknown character."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[np.minimum(points, len(self._ids) - 1)]
        unknown = np.flatnonzero((ids == _ABSENT) | (points >= len(self._ids)))
        if unknown.size:
            place = int(unknown[0])
            allowed = f"the {int((self._ids != _ABSENT).sum())} characters of the vocabulary"
            raise InvalidValue.of(f"text[{place}]", text[place], allowed)
        return ids


_PANIC = "PanicException"
"""The class name of the library's Rust panics; the class cannot be imported. It derives from BaseException, so that
`except Exception` would not catch it, and it would end a server."""


class LibraryErrors:
    """A context manager that turns errors of the library, plain Exceptions and panics, into `translate(message)`.

    A class instead of a generator, for speed, as it is entered for every token that is decoded.
    """

    def __init__(self, translate: Callable[[str], AttnError]) -> None:
        self._translate = translate

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, AttnError):
            return
        if isinstance(error, Exception) or type(error).__name__ == _PANIC:
            raise self._translate(str(error)) from error
