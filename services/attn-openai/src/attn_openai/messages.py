"""Conversations as OpenAI's clients send them, and as a model's chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import ChatMessage, Prompt

from attn_openai.tools import CLOSING, OPENING, Tools

ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call",
    "reasoning", "reasoning_content", "provider_specific_fields",
}  # fmt: skip
"""Fields of a message; clients send an answer back with all that it had. Those that are not read must be empty."""
READ_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
TEXT_PARTS = ("text", "input_text", "output_text")


def conversation(messages: Any, tools: Tools) -> Prompt:
    """The prompt of chat messages, with the functions told in the system message; raises `InvalidValue`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidValue.of("messages", messages, "a list of at least one message")
    found = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    return Prompt(chat=tuple(_joined(_told(found, tools.instructions))))


def _message(message: Any, place: str) -> tuple[str, str]:
    """Role and text of a message; a result of a tool keeps the role "tool"."""
    if not isinstance(message, dict):
        raise InvalidValue.of(place, message, "an object with role and content")
    for name, value in message.items():
        if name not in KNOWN_FIELDS:
            raise InvalidValue.of(f"{place}.{name}", value, "left out; fields are role, content, tool_calls, ...")
        if name not in READ_FIELDS and value not in (None, [], {}, ""):
            raise InvalidValue.of(f"{place}.{name}", value, "left out, as it is not read")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidValue.of(f"{place}.role", role, ", ".join(ROLES))
    calls = message.get("tool_calls") or []
    text = text_of(message.get("content"), f"{place}.content", optional=role == "assistant" and bool(calls))
    if calls:
        text = "\n".join(filter(None, [text, *_calls(calls, f"{place}.tool_calls")]))
    return ("system" if role == "developer" else str(role)), text


def text_of(content: Any, place: str, *, optional: bool = False) -> str:
    """The text of a content, given as text or as parts; raises `InvalidValue` for a part that is not text."""
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidValue.of(place, content, "a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidValue.of(f"{place}[{number}].type", kind, "text")
        texts.append(part["text"])
    return "".join(texts)


def call_text(name: str, arguments: str) -> str:
    """A call as the model would have written it; raises `InvalidValue` for arguments that are not JSON."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        raise InvalidValue.of("arguments", arguments, "JSON") from None
    told = json.dumps({"name": name, "arguments": parsed}, ensure_ascii=False)
    return f"{OPENING}\n{told}\n{CLOSING}"


def _calls(calls: Iterable[Any], place: str) -> Iterable[str]:
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue.of(f"{place}[{number}].function", function, "an object with name and arguments")
        yield call_text(function["name"], function.get("arguments") or "{}")


def _told(messages: list[tuple[str, str]], instructions: str) -> list[tuple[str, str]]:
    """The messages with the instructions at the end of the system message, or as one."""
    if not instructions:
        return messages
    if messages[0][0] == "system":
        return [("system", f"{messages[0][1]}\n\n{instructions}"), *messages[1:]]
    return [("system", instructions), *messages]


def _joined(messages: Iterable[tuple[str, str]]) -> Iterable[ChatMessage]:
    """The messages as templates know them: results of tools that follow one another are one message of the user."""
    results: list[str] = []
    for role, text in messages:
        if role == "tool":
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        yield ChatMessage(role=role, content=text)
    if results:
        yield ChatMessage(role="user", content="\n".join(results))
