"""Messages as published data write them: by many names, as pairs, as JSON, or as one text with marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema import IMAGE_PLACE
from attn_schema.chat_form import THOUGHT

Messages = list[dict[str, Any]]

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
CALL = ("function_call", "tool_call")
"""Roles of messages that are a call, as JSON."""
ROLES: Mapping[str, str] = (
    {name: name for name in (SYSTEM, USER, ASSISTANT, TOOL)}
    | dict.fromkeys(("human", "prompter", "[inst]", "<</sys>>"), USER)
    | dict.fromkeys(("gpt", "chatgpt", "bot", "bing", "bard", "ai", "model", "[/inst]", *CALL), ASSISTANT)
    | dict.fromkeys(("observation", "function", "tool_response", "function response"), TOOL)
    | {"<<sys>>": SYSTEM}
)
"""Roles by the names that published data give them, in lower case; other names are roles already."""
IMAGES = "images"
"""The key of a message for its images: each as data have it, or None or a number for one of its row's."""
TEXT_PARTS, IMAGE_PARTS = ("text", "input_text", "output_text"), ("image", "image_url", "input_image")
IMAGE_SOURCES = ("image", "image_url", "path", "url", "bytes", "index")
"""What says which image a part is."""
SPEAKER, CONTENT = ("role", "from", "speaker"), ("content", "value", "text")
ASKED = ("input", "human", "user", "question", "prompt", "instruction", "query")
ANSWERED = ("output", "assistant", "gpt", "bot", "answer", "response", "completion")
"""The keys of a question and its answer in one object."""
HH = re.compile(r"\n\n(Human|Assistant):")
"""What begins the turns of Anthropic's HH, whose conversations are texts in any column."""
MARKS = (
    HH,
    re.compile(r"\s*### (Human|Assistant):"),  # Guanaco
    re.compile(r"(?:^|\n\n\n)(USER|ASSISTANT|FUNCTION RESPONSE):"),  # Glaive
    re.compile(r"\s*<\|im_start\|>(\w+)\n"),  # ChatML
    re.compile(r"(?:\s*<s>)?\s*(\[/?INST\]|<</?SYS>>)"),  # Llama 2
)
"""What begins the turns of conversations that are one text."""
END = re.compile(r"\s*(</s>|<\|endoftext\|>|<\|im_end\|>)\s*$")


def said(role: str, content: str) -> Messages:
    """Return a conversation of one message; none of an empty content that is no answer."""
    return [{"role": role, "content": content}] if content or role == ASSISTANT else []


def marked(text: str, marks: Sequence[re.Pattern[str]] = MARKS) -> Messages | None:
    """Return the turns of a text that begins with a mark; None for another text."""
    mark = next((one for one in marks if one.match(text)), None)
    if mark is None:
        return None
    _, *turns = mark.split(text)
    found = [(_role(name), END.sub("", said).strip()) for name, said in zip(turns[::2], turns[1::2], strict=True)]
    return [{"role": role, "content": said} for role, said in found if said or role == ASSISTANT]


def messages_in(value: Any, name: str, role: str = USER) -> Messages:
    """Return the messages of a column: a list of them, also as JSON, one, or the text of one by `role`; lists of texts
    are turns, from the user's on, and pairs a question and its answer.

    Messages have a `SPEAKER` and a `CONTENT`; contents are texts or parts, of which those that are images become an
    `IMAGE_PLACE` in the text and one of the message's `IMAGES`. Raises `InvalidValue` for anything else.
    """
    if isinstance(value, str):
        if value.startswith(("[{", '["')) and name == "messages":
            return messages_in(json_in(value, name), name)
        turns = marked(value, MARKS if name == "messages" else (HH,))
        if turns is None and name == "messages":
            raise InvalidValue.of(name, value[:100], "a list of messages, JSON, or a text with the marks of its turns")
        return said(role, value) if turns is None else turns
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise InvalidValue.of(name, value, "a text, or a list of messages")
    if value and all(isinstance(turn, str) for turn in value):
        return [{"role": (USER, ASSISTANT)[place % 2], "content": turn} for place, turn in enumerate(value)]
    found: Messages = []
    calling = False
    for place, message in enumerate(value):
        call = isinstance(message, Mapping) and any(message.get(key) in CALL for key in SPEAKER)
        made = list(_messages(message, f"{name}[{place}]"))
        if call and calling:  # calls that follow one another are of one answer
            found[-1]["tool_calls"] += made.pop()["tool_calls"]
        found += made
        calling = call
    return found


def _role(name: Any) -> Any:
    return ROLES.get(name.lower(), name) if isinstance(name, str) else name


def _messages(message: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield a message, or those of a question and its answer."""
    if isinstance(message, list) and len(message) == 2 and all(isinstance(one, str) for one in message):
        message = dict(zip(("question", "answer"), message, strict=True))
    if not isinstance(message, Mapping):
        raise InvalidValue.of(place, message, "an object with role and content")
    if any(name in message for name in SPEAKER):
        yield _message(message, place)
        return
    pair = [next((name for name in names if name in message), None) for names in (ASKED, ANSWERED)]
    if None in pair:
        raise InvalidValue.of(place, message, "an object with role and content, or with a question and its answer")
    for role, name in zip((SYSTEM, USER, ASSISTANT), ("system", *pair), strict=True):
        if message.get(str(name)) or role == ASSISTANT:
            yield {"role": role, "content": message[name]}


def _message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    for name, others in (("role", SPEAKER), ("content", CONTENT)):
        if name not in kept and (given := next((key for key in others if key in kept), None)):
            kept = {name: kept.pop(given)} | kept
    if kept.get("role") in CALL:
        kept["function_call"] = json_in(kept.pop("content", None), place)
    kept["role"] = _role(kept.get("role"))
    if isinstance(kept.get("content"), list):
        images = list[Any]()
        kept["content"] = "".join(_part(part, f"{place}.content", images) for part in kept["content"])
        kept |= {IMAGES: images} if images else {}
    if "train" in kept and "weight" not in kept:  # as axolotl has it
        kept["weight"] = int(kept.pop("train") is True)
    for name in ("thinking", "reasoning"):
        if name in kept:
            kept[THOUGHT] = kept.pop(name)
    return _with_calls(kept)


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "function_call" in message:  # as calls were before there could be several
        message["tool_calls"] = [message.pop("function_call")]
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [as_function(call) for call in calls]
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    return message


def as_function(value: Any) -> Any:
    """Return a tool or a call that is only its function in the form that has a type, too."""
    plain = isinstance(value, Mapping) and "function" not in value and "name" in value
    return {"type": "function", "function": value} if plain else value


def _part(part: Any, place: str, images: list[Any]) -> str:
    """The text of a part of a content; of an image, which is appended to `images`, an `IMAGE_PLACE`."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in IMAGE_PARTS:
        encoded = {"url": f"data:;base64,{part['base64']}"} if part.get("base64") else part
        images.append(next((encoded[key] for key in IMAGE_SOURCES if encoded.get(key) is not None), None))
        return IMAGE_PLACE
    raise InvalidValue.of(place, part, "parts of the types text and image; others are not trained on")


def json_in(value: Any, name: str) -> Any:
    """Return a value, or what its text holds as JSON; raises `InvalidValue`."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidValue.of(name, value, "JSON") from error
