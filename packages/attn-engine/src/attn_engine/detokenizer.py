"""Incremental detokenization of a growing completion, and detection of its stop strings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

from attn_core.models import Tokenizer

REPLACEMENT = "\ufffd"
PREFIX_TOKENS = 4
"""The number of earlier tokens that are decoded with the new ones: otherwise some tokenizers drop a leading space."""
MAX_WINDOW = 16
"""The number of tokens decoded together before the oldest are dropped from the window."""
MAX_INCOMPLETE_BYTES = 3
"""The maximum number of bytes of an incomplete UTF-8 character, each decoded as U+FFFD."""
CACHED_TOKENS = 65536

TokenText = Callable[[int], tuple[str, bytes]]
"""Maps a token id to the text of that token decoded by itself, and to its bytes if it is part of a character."""


@runtime_checkable
class StreamTokenizer(Protocol):
    """A tokenizer that says how its tokens become text, so that text can be returned while it grows."""

    @property
    def text_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes that each token adds to a text, if texts are these bytes as UTF-8; None for other tokenizers."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out."""
        ...

    def joins_bytes(self, token_id: int) -> bool:
        """Whether the token is a byte that is decoded together with the bytes next to it, as of byte fallback."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of a token within a text, with the space that it begins with; U+FFFD for part of a character."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds within a text."""
        ...


def token_text(tokenizer: Tokenizer | None) -> TokenText:
    """A cached function that decodes single tokens, special tokens included; it returns "" without a tokenizer."""
    if tokenizer is None:
        return lambda _: ("", b"")
    known: Tokenizer = tokenizer

    def decoded(token: int) -> tuple[str, bytes]:
        if not isinstance(known, StreamTokenizer):
            return known.decode([token], skip_special=False), b""
        text = known.token_text(token)
        return text, known.token_bytes(token) if REPLACEMENT in text else b""

    return lru_cache(CACHED_TOKENS)(decoded)


class Detokenizer(ABC):
    """Decodes tokens one at a time into pieces of text that no later token can change.

    Joined, the pieces are the text of all tokens.
    """

    @staticmethod
    def of(tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True) -> Detokenizer:
        """The detokenizer of a completion of `prompt`; it leaves special tokens out unless `skip_special` is false."""
        if not isinstance(tokenizer, StreamTokenizer):
            return WindowDetokenizer(tokenizer, prompt[-PREFIX_TOKENS:])
        if tokenizer.text_bytes is not None:
            plain: Detokenizer = ByteDetokenizer(tokenizer, tokenizer.text_bytes, prompt[-PREFIX_TOKENS:])
        else:
            plain = WindowDetokenizer(tokenizer, _context(tokenizer, prompt), tokenizer)
        return plain if skip_special else SpecialDetokenizer(plain, tokenizer)

    @abstractmethod
    def push(self, token: int) -> str:
        """The text that becomes final with this token; empty while a later token may change it."""

    @abstractmethod
    def copy(self) -> Detokenizer:
        """A copy in the same state."""

    @abstractmethod
    def finish(self) -> str:
        """The rest of the text, at the end of the completion; an incomplete character becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Decodes tokens whose bytes, one after another, are UTF-8 (byte-level BPE)."""

    def __init__(self, tokenizer: Tokenizer, text_bytes: Mapping[int, bytes], prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._bytes = text_bytes
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        try:
            more = self._bytes[token]
        except KeyError:
            return self._tokenizer.decode([token])  # raises the error of an id outside the vocabulary
        return self._decoder.decode(more)

    def copy(self) -> ByteDetokenizer:
        """See `Detokenizer.copy`."""
        copy = ByteDetokenizer(self._tokenizer, self._bytes)
        copy._decoder.setstate(self._decoder.getstate())
        return copy

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes each token together with some before it, which `context` begins with.

    Byte fallback decodes neighbouring bytes as a whole: while their last character is incomplete, or if any is invalid,
    all of them become U+FFFD. So bytes are held back until another token follows (`StreamTokenizer.joins_bytes`).
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), stream: StreamTokenizer | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._ids = list(context)
        text = tokenizer.decode(self._ids)
        # An incomplete character at the end of the prompt belongs to the completion that completes it.
        joined = stream is not None and bool(self._ids) and stream.joins_bytes(self._ids[-1])
        self._returned = len(self._without_incomplete(text) if joined else _complete_part(text))

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        stream = self._stream
        if stream is not None and _left_out(stream, token):
            return ""
        self._ids.append(token)
        if stream is not None and stream.joins_bytes(token):
            return ""
        whole = self._tokenizer.decode(self._ids)
        complete = _complete_part(whole)
        piece = complete[self._returned :]
        self._returned = max(self._returned, len(complete))
        if len(complete) == len(whole) and len(self._ids) > MAX_WINDOW:
            self._shorten()
        return piece

    def copy(self) -> WindowDetokenizer:
        """See `Detokenizer.copy`."""
        copy = WindowDetokenizer(self._tokenizer, (), self._stream)
        copy._ids, copy._returned = list(self._ids), self._returned
        return copy

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        whole = self._tokenizer.decode(self._ids)
        piece = whole[self._returned :]
        self._returned = len(whole)
        return piece

    def _without_incomplete(self, text: str) -> str:
        """The text of the context, without bytes at its end that begin a character; all of it if other bytes are
        invalid."""
        for count in range(MAX_INCOMPLETE_BYTES + 1):
            before = text if count == 0 else self._tokenizer.decode(self._ids[:-count])
            if not before.endswith(REPLACEMENT):
                return before
        return text

    def _shorten(self) -> None:
        """Drop all but the last tokens, unless they have no text: the next one would lose its leading space."""
        text = self._tokenizer.decode(self._ids[-PREFIX_TOKENS:])
        if text:
            del self._ids[:-PREFIX_TOKENS]
            self._returned = len(text)


class SpecialDetokenizer(Detokenizer):
    """Writes special tokens into the text of another detokenizer, which leaves them out."""

    def __init__(self, plain: Detokenizer, stream: StreamTokenizer) -> None:
        self._plain = plain
        self._stream = stream

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        if token not in self._stream.special_ids:
            return self._plain.push(token)
        return self._plain.finish() + self._stream.token_text(token)

    def copy(self) -> SpecialDetokenizer:
        """See `Detokenizer.copy`."""
        return SpecialDetokenizer(self._plain.copy(), self._stream)

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._plain.finish()


def _context(stream: StreamTokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that have text, and all bytes that are decoded together with the last."""
    found: list[int] = []
    joined = True
    for token in reversed(prompt):
        if _left_out(stream, token):
            continue
        joined = joined and stream.joins_bytes(token)
        if len(found) >= PREFIX_TOKENS and not joined:
            break
        found.append(token)
    return found[::-1]


def _left_out(stream: StreamTokenizer, token: int) -> bool:
    """Whether decoding leaves the id out: that of a special token, or of a row of the embedding without a token."""
    return token in stream.special_ids or not stream.token_text(token)


def _complete_part(text: str) -> str:
    """The text without a character at its end that more bytes could complete."""
    if not text.endswith(REPLACEMENT):
        return text
    end = len(text)
    while end > 0 and len(text) - end < MAX_INCOMPLETE_BYTES and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


class StopStrings:
    """Finds stop strings in text that arrives in pieces; holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, once it has appeared."""

    def push(self, piece: str) -> str:
        """The text that may be returned now; empty once a stop string has been found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: hit[0])
            self._held = ""
            return text[:at]
        held = self._longest_prefix(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def copy(self) -> StopStrings:
        """A copy in the same state."""
        copy = StopStrings(self._stops)
        copy._held, copy.found = self._held, self.found
        return copy

    def finish(self) -> str:
        """The text that was held back, at the end of the completion."""
        held, self._held = self._held, ""
        return held

    def _longest_prefix(self, text: str) -> int:
        """The number of characters at the end of the text that could begin a stop string; the longest match."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
