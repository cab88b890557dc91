"""Incremental detokenization of a growing completion, and detection of its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from attn_core.models import Tokenizer

REPLACEMENT = "\ufffd"
PREFIX_TOKENS = 4
"""The number of earlier tokens that are decoded with the new ones: otherwise some tokenizers drop a leading space."""
MAX_WINDOW = 16
"""The number of tokens decoded together before the oldest are dropped from the window."""
MAX_INCOMPLETE_BYTES = 3
"""The maximum number of bytes of an incomplete UTF-8 character, each decoded as U+FFFD."""
CACHED_TOKENS = 65536

TokenText = Callable[[int], str]
"""Maps a token id to the text of that token decoded by itself."""


def token_text(tokenizer: Tokenizer | None) -> TokenText:
    """A cached function that decodes single tokens, special tokens included; it returns "" without a tokenizer."""
    if tokenizer is None:
        return lambda _: ""
    return lru_cache(CACHED_TOKENS)(lambda token: tokenizer.decode([token], skip_special=False))


class Detokenizer:
    """Decodes tokens one at a time into pieces of text that no later token can change."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-PREFIX_TOKENS:])
        self._returned = len(_complete_part(self._decode()))

    def push(self, token: int) -> str:
        """The text that becomes final with this token; empty while a character is incomplete."""
        before = len(self._ids)
        self._ids.append(token)
        whole = self._decode()
        complete = _complete_part(whole)
        piece = complete[self._returned :]
        if len(complete) == len(whole) and before >= MAX_WINDOW:
            del self._ids[: max(0, before - PREFIX_TOKENS + 1)]
            self._returned = len(self._decode())
        else:
            self._returned = max(self._returned, len(complete))
        return piece

    def copy(self) -> Detokenizer:
        """A copy in the same state."""
        copy = Detokenizer(self._tokenizer)
        copy._ids, copy._returned = list(self._ids), self._returned
        return copy

    def finish(self) -> str:
        """The rest of the text, at the end of the completion; an incomplete character becomes U+FFFD."""
        whole = self._decode()
        piece = whole[self._returned :]
        self._returned = len(whole)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)


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
