"""Text of a growing completion: only what can no longer change is given out."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.models import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT = 4
"""Prompt tokens that precede the completion when it is decoded: some tokenizers drop a leading space otherwise."""
LONGEST = 16
"""Tokens that are decoded together before the oldest of them are left out, which costs decoding the others again."""
LONGEST_CHARACTER = 3
"""Bytes of UTF-8 that an incomplete character can have at most, each shown as one U+FFFD at most."""


class Detokenizer:
    """CosSin tokens, as they come, into pieces of text that together are the text of all of them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._given = len(_settled(self._decode()))

    def push(self, token: int) -> str:
        """The text that has become final with this token; empty while a character is incomplete."""
        before = len(self._ids)
        self._ids.append(token)
        whole = self._decode()
        settled = _settled(whole)
        piece = settled[self._given :]
        if len(settled) == len(whole) and before >= LONGEST:
            del self._ids[: max(0, before - CONTEXT + 1)]
            self._given = len(self._decode())
        else:
            self._given = max(self._given, len(settled))
        return piece

    def copy(self) -> Detokenizer:
        """Another that goes on from the same text."""
        found = Detokenizer(self._tokenizer)
        found._ids, found._given = list(self._ids), self._given
        return found

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""
        whole = self._decode()
        piece = whole[self._given :]
        self._given = len(whole)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)


def _settled(text: str) -> str:
    """The text without a character at its end that more bytes could complete."""
    if not text.endswith(REPLACEMENT):
        return text
    end = len(text)
    while end > 0 and len(text) - end < LONGEST_CHARACTER and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, once it has appeared."""

    def push(self, piece: str) -> str:
        """The text that may be given out now; nothing after a stop string has been found."""
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
        hold = self._longest_beginning(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def copy(self) -> StopStrings:
        """Another that goes on from the same text."""
        found = StopStrings(self._stops)
        found._held, found.found = self._held, self.found
        return found

    def finish(self) -> str:
        """What was held back, as no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
