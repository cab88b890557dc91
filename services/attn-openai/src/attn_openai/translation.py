"""Chat completions that are made of requests in another format: their messages, and how their fields were sent.

Everything behind the routes speaks of the fields of a chat completion; who has sent another is told of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue

from attn_openai.requests import renamed


@dataclass
class Translation:
    """The messages of a chat completion, made of a request in another format.

    `words` has the names of that format, by patterns of the names in a chat completion, of which the first that matches
    counts; `places` says where each message and call was sent.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def say(self, place: str, role: Any, content: Any, **fields: Any) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content, **fields})
        self.places[self._last] = place

    def part(self, place: str, part: dict[str, Any]) -> None:
        """Add a part to the content of the last message."""
        parts = self.messages[-1]["content"] = self.messages[-1]["content"] or []
        parts.append(part)
        self.places[f"{self._last}.content[{len(parts) - 1}]"] = place

    def think(self, text: str) -> None:
        """Add to the thought of the last message."""
        self.messages[-1]["reasoning_content"] = self.messages[-1].get("reasoning_content", "") + text

    def call(self, place: str, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a function call to the last message."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "function": {"name": name, "arguments": arguments}})
        self.places[f"{self._last}.tool_calls[{len(calls) - 1}]"] = place

    def sent(self, name: str) -> str:
        """The name of a field of the chat completion in the request that was sent."""
        starts = [start for start in self.places if name == start or name.startswith((f"{start}.", f"{start}["))]
        if starts:
            start = max(starts, key=len)
            name = self.places[start] + name[len(start) :]
        for pattern, word in self.words.items():
            name, found = re.subn(pattern, word, name)
            if found:
                break
        return name

    @contextmanager
    def sent_names(self) -> Iterator[None]:
        """Name the fields in errors as they were sent."""
        try:
            yield
        except InvalidValue as error:
            given = str(error.metadata.get("field", ""))
            if (name := self.sent(given)) == given:
                raise
            raise renamed(error, name) from error
