"""What a conversation must look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core.errors import InvalidValue


def check_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The messages as plain dictionaries of `role` and `content`.

    Raises InvalidValue, naming the message, when there are none, or one lacks a role or a content of text.
    """
    if not messages:
        raise InvalidValue.of("messages", [], "at least one message")
    checked = []
    for place, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidValue.of(f"messages[{place}].{key}", message.get(key), "a string")
        if not message["role"]:
            raise InvalidValue.of(f"messages[{place}].role", "", "a role such as system, user or assistant")
        checked.append({"role": message["role"], "content": message["content"]})
    return checked
