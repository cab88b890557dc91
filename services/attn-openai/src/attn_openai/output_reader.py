"""Splits the text of a completion, while it arrives, into thoughts, plain text and function calls.

What is read is the same however the text is cut into pieces.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from attn_openai.call_formats import CallFormat, ThoughtFormat, tolerant
from attn_openai.notations import Reading


class Text(NamedTuple):
    """Plain text."""

    text: str


class Thought(NamedTuple):
    """Text of the model's thoughts."""

    text: str


class CallBegin(NamedTuple):
    """A call of a function begins."""

    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the last call, as JSON text."""

    text: str


Part: TypeAlias = Text | Thought | CallBegin | CallArguments


class At(Enum):
    """Where the reader is."""

    TEXT = auto()
    THOUGHT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    BETWEEN = auto()


def new_call_id() -> str:
    """A new id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass
class OutputReader:
    """Reads one completion of a model that writes `calls` to `functions`, whose parameters are given by name.

    `thinking` says whether the prompt ends within a thought.
    """

    calls: CallFormat | None = None
    thoughts: ThoughtFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinking: bool = False
    cut: bool = False
    """Whether the completion ended within a call."""

    def __post_init__(self) -> None:
        self._held = ""
        self._at = At.THOUGHT if self.thinking and self.thoughts else At.TEXT
        self._begun = False
        """Whether the present text or thought has a character that is no blank."""
        self._blanks = self._at is At.THOUGHT
        """Whether blanks at the beginning of the present text are left out, as they belong to the marks before it."""
        self._reading = Reading({})
        dropped = (self.thoughts.answer, *self.thoughts.dropped) if self.thoughts else ()
        opening = (self.thoughts.opening,) if self.thoughts else ()
        found: dict[str, At | None] = dict.fromkeys(filter(None, dropped))
        found |= dict.fromkeys(opening, At.THOUGHT)
        if self.calls:
            found |= dict.fromkeys(self.calls.triggers(list(self.functions)), At.HEAD)
            self._head, self._tail = self.calls.head(), self.calls.tail()
            self._closing = tolerant(self.calls.closing) if self.calls.closing else None
        self._marks = found

    @property
    def in_thought(self) -> bool:
        """Whether it is within a thought."""
        return self._at is At.THOUGHT

    def read(self, text: str, *, last: bool = False, cut: bool = False) -> Iterator[Part]:
        """Add `text`; yields what is certain by now, all of it if it is the `last`.

        `cut` says that the completion ended at the maximum number of tokens.
        """
        self._held += text
        steps = {
            At.TEXT: self._text, At.THOUGHT: self._thought, At.HEAD: self._call_head,
            At.ARGUMENTS: self._arguments, At.TAIL: self._call_tail, At.BETWEEN: self._between,
        }  # fmt: skip
        while True:
            before = (self._at, len(self._held))
            yield from steps[self._at](last)
            if (self._at, len(self._held)) == before:
                break
        if last:
            yield from self._finish(cut)

    def _finish(self, cut: bool) -> Iterator[Part]:  # noqa: FBT001 - as in `read`
        self.cut = self._at is At.ARGUMENTS or (cut and self._at in {At.HEAD, At.BETWEEN})
        if self._at is At.HEAD and not cut and self._held.strip():
            yield Text(self._held)  # a mark that no call followed
        self._held = ""

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _certain(self, marks: tuple[str, ...], last: bool) -> int:  # noqa: FBT001
        """The number of characters that no mark, and no blank before a mark, can begin with."""
        if last:
            return len(self._held)
        end = len(self._held)
        longest = max(map(len, marks), default=1)
        for place in range(max(0, end - longest + 1), end):
            if any(mark.startswith(self._held[place:]) for mark in marks):
                end = place
                break
        return len(self._held[:end].rstrip())

    def _show(self, kind: type[Text] | type[Thought], text: str) -> Iterator[Part]:
        if self._blanks and not self._begun:
            text = text.lstrip()
        if text:
            self._begun = self._begun or bool(text.strip())
            yield kind(text)

    def _enter(self, at: At) -> None:
        self._at, self._begun, self._blanks = at, False, True

    def _text(self, last: bool) -> Iterator[Part]:  # noqa: FBT001
        found = [(place, -len(mark), mark) for mark in self._marks if (place := self._held.find(mark)) >= 0]
        if not found:
            yield from self._show(Text, self._take(self._certain(tuple(self._marks), last)))
            return
        place, _, mark = min(found)
        if not last and any(
            len(longer) > len(mark) and longer.startswith(self._held[place:]) for longer in self._marks
        ):
            yield from self._show(Text, self._take(len(self._held[:place].rstrip())))
            return  # it may be the beginning of a longer mark
        kind = self._marks[mark]
        text = self._take(place)
        yield from self._show(Text, text.rstrip() if kind is At.HEAD or not text.strip() else text)
        if kind is not At.HEAD:
            self._take(len(mark))
        if kind is None:
            self._blanks = self._blanks or not self._begun
        else:
            self._enter(kind)

    def _thought(self, last: bool) -> Iterator[Part]:  # noqa: FBT001
        closing = self.thoughts.closing if self.thoughts else ""
        place = self._held.find(closing)
        if place < 0:
            yield from self._show(Thought, self._take(self._certain((closing,), last)))
            return
        yield from self._show(Thought, self._take(place).rstrip())
        self._take(len(closing))
        self._enter(At.TEXT)

    def _call_head(self, last: bool) -> Iterator[Part]:  # noqa: FBT001, ARG002 - as the other steps
        found = self._head.match(self._held)
        if found is None:
            return
        name = next(filter(None, found.groups()))
        self._take(found.end())
        self._reading = Reading(self.functions.get(name, {}))
        self._at = At.ARGUMENTS
        yield CallBegin(new_call_id(), name)

    def _arguments(self, last: bool) -> Iterator[Part]:  # noqa: FBT001, ARG002
        if self.calls is None:
            return
        piece = self.calls.notation.read(self._held, self._reading)
        self._take(piece.length)
        if piece.text:
            yield CallArguments(piece.text)
        if piece.done:
            self._at = At.TAIL

    def _call_tail(self, last: bool) -> Iterator[Part]:  # noqa: FBT001, ARG002
        found = self._tail.match(self._held)
        if found is not None:
            self._take(found.end())
            self._enter(At.BETWEEN if self._closing else At.TEXT)
        yield from ()

    def _between(self, last: bool) -> Iterator[Part]:  # noqa: FBT001, ARG002
        closed = re.match(self._closing or "", self._held)
        if closed is not None:
            self._take(closed.end())
            self._enter(At.TEXT)
        elif self._head.match(self._held):
            self._enter(At.HEAD)
        yield from ()
