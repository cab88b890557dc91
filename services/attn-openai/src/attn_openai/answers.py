"""The conversations that /v1/responses has answered, so that later requests can go on with them."""

from __future__ import annotations

import json
from typing import Any

from attn_core.errors import UnknownName

STORED_BYTES = 64 << 20
"""How much text of answers is kept for later requests; the oldest are dropped first."""


class AnswerStore:
    """The conversations of answers, by caller and id, for `previous_response_id`; in memory only."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], bytes] = {}
        self._size = 0

    def put(self, owner: str, name: str, messages: list[Any]) -> None:
        """Keep a conversation; drops the oldest ones beyond the limit."""
        text = json.dumps(messages).encode()
        self._size -= len(self._found.pop((owner, name), b""))
        self._found[owner, name] = text
        self._size += len(text)
        while self._size > STORED_BYTES:
            self._size -= len(self._found.pop(next(iter(self._found))))

    def get(self, owner: str, name: str) -> list[Any]:
        """The conversation of an answer to the same caller; raises `UnknownName`."""
        text = self._found.get((owner, name))
        if text is None:
            raise UnknownName(f"unknown response {name!r}; it is not stored, or no longer", kind="response", name=name)
        messages: list[Any] = json.loads(text)
        return messages
