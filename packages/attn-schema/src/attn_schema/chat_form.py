"""The forms of calls, results and thoughts in which chat templates take them, for prompts and for training alike."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

Ids = Literal["given", "kimi", "nine"]
IDS: tuple[Ids, ...] = ("given", "kimi", "nine")
"""The ids of calls that templates take: any, those with the name of the function, those of nine letters or digits."""
THOUGHT = "reasoning_content"
"""The key of a message that holds its thoughts."""


@dataclass(frozen=True)
class ChatForm:
    """The form of messages with calls: the ids of calls, arguments as text (JSON) or as objects, and the content of
    messages that have none: None, or an empty text."""

    ids: Ids = "given"
    text_arguments: bool = False
    null_content: bool = False

    @classmethod
    def every(cls) -> Iterator[ChatForm]:
        """All forms, the most common first."""
        return (cls(*chosen) for chosen in product(IDS, (False, True), (False, True)))

    def id_of(self, call_id: str, name: str, number: int) -> str:
        """The id of a call of the function `name` in this form; `number` counts the calls before it."""
        if self.ids == "kimi":
            return f"functions.{name}:{number}"
        if self.ids == "nine" and not re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
            return hashlib.sha256(call_id.encode()).hexdigest()[:9]
        return call_id

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield messages, of which calls have their arguments as objects, in this form.

        Results get the ids and the names of their calls; those without an id are of the newest call. Thoughts have all
        the names of which templates read one.
        """
        known: dict[str, tuple[str, str]] = {}
        for message in messages:
            made = dict(message)
            if thought := made.get(THOUGHT):
                made |= {"reasoning": thought, "thinking": thought}
            if calls := made.get("tool_calls"):
                made["tool_calls"] = [self._call(call, known) for call in calls]
                made["content"] = made.get("content") or (None if self.null_content else "")
            elif made.get("role") == "tool":
                given = str(made.get("tool_call_id", next(reversed(known), "")))
                made["tool_call_id"], name = known.get(given, (given, None))
                made.setdefault("name", name)
            yield made

    def _call(self, call: Mapping[str, Any], known: dict[str, tuple[str, str]]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        given = str(call.get("id", f"call_{len(known)}"))
        known[given] = self.id_of(given, name, len(known)), name
        said = json.dumps(arguments, ensure_ascii=False) if self.text_arguments else arguments
        return {"id": known[given][0], "type": "function", "function": {"name": name, "arguments": said}}
