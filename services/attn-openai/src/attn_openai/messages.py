"""Conversion of conversations from OpenAI's format to that of a model's chat template."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from attn_core.errors import InvalidValue
from attn_schema import IMAGE_PLACE, ChatMessage, Prompt

from attn_openai.tools import CLOSING, OPENING, Tools

ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call",
    "reasoning", "reasoning_content", "provider_specific_fields",
}  # fmt: skip
"""Fields of a message; clients send a response back with all its fields. Those that are not read must be empty."""
READ_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image")
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,([A-Za-z0-9+/=]+)")


def conversation(messages: Any, tools: Tools) -> Prompt:
    """The prompt of chat messages, with the functions described in the system message; raises `InvalidValue`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidValue.of("messages", messages, "a list of at least one message")
    found = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    return Prompt(chat=tuple(_with_merged_tool_results(_with_instructions(found, tools.instructions))))


class ParsedMessage(NamedTuple):
    """The role and text of a message, with U+FFFC in place of each image, and the images' files."""

    role: str
    text: str
    images: tuple[bytes, ...] = ()


def _message(message: Any, place: str) -> ParsedMessage:
    """Parse a message; the result of a tool keeps the role "tool"."""
    if not isinstance(message, dict):
        raise InvalidValue.of(place, message, "an object with role and content")
    for name, value in message.items():
        if name not in KNOWN_FIELDS:
            raise InvalidValue.of(
                f"{place}.{name}", value, "left out, as it is unknown; fields are role, content, tool_calls, ..."
            )
        if name not in READ_FIELDS and value not in (None, [], {}, ""):
            raise InvalidValue.of(f"{place}.{name}", value, "left out, as it is not supported")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidValue.of(f"{place}.role", role, ", ".join(ROLES))
    calls = message.get("tool_calls")
    calls = [] if calls is None else calls
    text, images = _content_of(message.get("content"), f"{place}.content", optional=role == "assistant" and bool(calls))
    if calls:
        text = "\n".join(filter(None, [text, *_calls(calls, f"{place}.tool_calls")]))
    return ParsedMessage("system" if role == "developer" else str(role), text, images)


def _content_of(content: Any, place: str, *, optional: bool = False) -> tuple[str, tuple[bytes, ...]]:
    """The text of a message's content, with U+FFFC in place of each image, and the images' files.

    Raises `InvalidValue` for a part that is neither text nor an image in a data URL.
    """
    if content is None and optional:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, Sequence):
        raise InvalidValue.of(place, content, "a text, or a list of parts of type text and image_url")
    texts, images = list[str](), list[bytes]()
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            images.append(_image(part, f"{place}[{number}].image_url"))
            texts.append(IMAGE_PLACE)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InvalidValue.of(f"{place}[{number}].type", kind, "text or image_url")
    return "".join(texts), tuple(images)


def _image(part: dict[str, Any], place: str) -> bytes:
    """The file in the data URL of OpenAI's `image_url` or `input_image`; other URLs are refused, not fetched."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    found = DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        shown = url[:60] if isinstance(url, str) else url
        raise InvalidValue.of(place, shown, "data:image/TYPE;base64,... (images at other URLs are not fetched)")
    try:
        return base64.b64decode(found[1], validate=True)
    except ValueError:
        raise InvalidValue.of(place, f"{len(found[1])} characters", "base64") from None


def call_text(name: str, arguments: str) -> str:
    """A function call as the model writes it; raises `InvalidValue` for arguments that are not JSON."""
    try:
        call = json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise InvalidValue.of("arguments", arguments[:100], "JSON") from None
    return f"{OPENING}\n{call}\n{CLOSING}"


def _calls(calls: Any, place: str) -> Iterable[str]:
    if not isinstance(calls, list):
        raise InvalidValue.of(place, calls, "a list of function calls")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue.of(f"{place}[{number}].function", function, "an object with name and arguments")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | None):
            raise InvalidValue.of(f"{place}[{number}].function.arguments", arguments, "a text with JSON")
        yield call_text(function["name"], arguments or "{}")


def _with_instructions(messages: list[ParsedMessage], instructions: str) -> list[ParsedMessage]:
    """The messages with the instructions at the end of the system message, or as a new system message."""
    if not instructions:
        return messages
    first = messages[0]
    if first.role == "system":
        return [first._replace(text=f"{first.text}\n\n{instructions}"), *messages[1:]]
    return [ParsedMessage("system", instructions), *messages]


def _with_merged_tool_results(messages: Iterable[ParsedMessage]) -> Iterable[ChatMessage]:
    """The messages for chat templates: consecutive results of tools are merged into one user message."""
    results: list[str] = []
    for role, text, images in messages:
        if role == "tool":
            if images:
                raise InvalidValue.of("messages", "an image in a tool result", "only text in tool results")
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        yield ChatMessage(role=role, content=text, images=images)
    if results:
        yield ChatMessage(role="user", content="\n".join(results))
