"""Parses conversations in OpenAI's format: what is read of a message, what is ignored and why, and what is refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import IMAGE_PLACE

from attn_openai.templates import Call, Turn

ROLES = ("system", "developer", "user", "assistant", "tool")
READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"})
"""The fields of a message that are read. Any others are passed to the chat template, if it reads them."""
IGNORED: Mapping[str, str] = {
    "annotations": "they cite sources of an answer whose text is in content",
    "audio": "ignored if null, as no audio is generated",
    "cache_control": "prefixes are always cached",
    "function_call": "ignored if null; calls are in tool_calls",
    "id": "messages are not stored",
    "index": "the place in the list says the same",
    "parsed": "content has the same as text",
    "parsed_arguments": "arguments has the same as text",
    "phase": "it marks kinds of answers of other models",
    "provider_specific_fields": "what other servers added to an answer",
    "refusal": "ignored if null; answers of this server have none",
    "status": "only complete messages are sent",
    "type": "a message, or a call of a function",
}
"""Fields of messages, parts and calls that mean nothing here, with the reason."""
NULL_ONLY = frozenset({"audio", "function_call", "refusal"})
"""Ignored fields whose values would matter."""
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image")
PART_FIELDS = frozenset({"text", "image_url", "detail", "logprobs", "refusal"})
CALL_FIELDS = frozenset({"function", "call_id"})
FUNCTION_FIELDS = frozenset({"name", "arguments"})
DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,([A-Za-z0-9+/=]+)")


def require_known(value: Mapping[str, Any], place: str, known: Container[str]) -> None:
    """Raise `InvalidValue`, naming a field that is neither known nor ignored; null is the absence of any field."""
    for name, given in value.items():
        if given is None or given in ([], {}, "") or name in known:
            continue
        if name not in IGNORED or name in NULL_ONLY:
            raise InvalidValue.of(f"{place}.{name}", given, "left out, as it is not supported")


def turns_of(messages: Any) -> list[Turn]:
    """The messages of a conversation, with the results of calls in the order of the calls; raises `InvalidValue`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidValue.of("messages", messages, "a list of at least one message")
    return list(_in_order([_turn(message, f"messages[{place}]") for place, message in enumerate(messages)]))


def _in_order(turns: Sequence[Turn]) -> Iterator[Turn]:
    """The turns with the results of each message's calls in the order of these calls; raises `InvalidValue`."""
    waiting: dict[str, Turn | None] = {}
    seen: set[str] = set()
    for turn in (*turns, Turn("")):
        if turn.role == "tool":
            call_id = turn.call_id
            if call_id is None:  # then results are in the order of the calls
                call_id = next((one for one, result in waiting.items() if result is None), None)
            if call_id is None or waiting.get(call_id, turn) is not None:
                allowed = f"the id of a call before it without a result: {', '.join(waiting) or 'there is none'}"
                raise InvalidValue.of(f"{turn.place}.tool_call_id", turn.call_id, allowed)
            waiting[call_id] = Turn("tool", turn.text, call_id=call_id, extra=turn.extra, place=turn.place)
            continue
        yield from filter(None, waiting.values())
        if not turn.role:
            return
        waiting = dict.fromkeys(call.id for call in turn.calls)
        for number, call in enumerate(turn.calls):
            if call.id in seen:
                raise InvalidValue.of(f"{turn.place}.tool_calls[{number}].id", call.id, "an id that no other call has")
            seen.add(call.id)
        yield turn


def _turn(message: Any, place: str) -> Turn:
    if not isinstance(message, dict):
        raise InvalidValue.of(place, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidValue.of(f"{place}.role", role, ", ".join(ROLES))
    for name in NULL_ONLY & message.keys():
        if message[name] not in (None, [], {}, ""):
            raise InvalidValue.of(f"{place}.{name}", message[name], "left out, as it is not supported")
    calls = tuple(_calls(message.get("tool_calls"), f"{place}.tool_calls"))
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(thought, str):
        raise InvalidValue.of(f"{place}.reasoning_content", thought, "a text")
    optional = role == "assistant" and bool(calls or thought)
    text, images = _content_of(message.get("content"), f"{place}.content", optional=optional)
    if images and role != "user":
        raise InvalidValue.of(f"{place}.content", "an image", "only text, except in messages of the user")
    extra = {k: v for k, v in message.items() if k not in READ and k not in IGNORED and v not in (None, [], {}, "")}
    if isinstance(message.get("name"), str):
        extra["name"] = message["name"]
    call_id = message.get("tool_call_id")
    if call_id is not None and (role != "tool" or not isinstance(call_id, str)):
        raise InvalidValue.of(f"{place}.tool_call_id", call_id, "the id of a call, in a message of the role tool")
    said = "system" if role == "developer" else str(role)
    return Turn(said, text, images, calls, call_id, thought, tuple(extra.items()), place)


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
        kind, here = part.get("type") if isinstance(part, dict) else None, f"{place}[{number}]"
        if kind in IMAGE_PARTS:
            require_known(part, here, PART_FIELDS)
            images.append(_image(part, f"{here}.image_url"))
            texts.append(IMAGE_PLACE)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            require_known(part, here, PART_FIELDS)
            texts.append(part["text"])
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            raise InvalidValue.of(f"{here}.type", kind, "text or image_url")
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


def _calls(calls: Any, place: str) -> Iterator[Call]:
    if calls is not None and not isinstance(calls, list):
        raise InvalidValue.of(place, calls, "a list of function calls")
    for number, call in enumerate(calls or ()):
        here = f"{place}[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue.of(f"{here}.function", function, "an object with name and arguments")
        require_known(call, here, CALL_FIELDS)
        require_known(function, f"{here}.function", FUNCTION_FIELDS)
        call_id = call.get("id")
        if not isinstance(call_id, str | None):
            raise InvalidValue.of(f"{here}.id", call_id, "a text")
        arguments = arguments_of(function.get("arguments"), f"{here}.function.arguments")
        yield Call(call_id or f"{place}[{number}]", function["name"], arguments)


def arguments_of(given: Any, field: str) -> dict[str, Any]:
    """The arguments of a call, an object or its JSON text; raises `InvalidValue`, also for those of a call cut off."""
    try:
        value = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = given[:100] if isinstance(given, str) else given
        raise InvalidValue.of(field, shown, "a JSON object, whole; arguments that were cut off cannot be sent back")
    return value
