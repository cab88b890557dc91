"""The shapes in which conversations, texts, pairs and labels are published, recognised by their columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.chat_form import THOUGHT

from attn_train.data.messages import ASSISTANT, SYSTEM, Messages, as_function, json_in, marked, messages_in, said
from attn_train.data.token_rows import MASKS, PACKED, token_rows

Values = Mapping[str, Any]
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": (
        *("messages", "conversations", "conversation", "dialogue", "dialog", "data", "chat", "trajectory"),
        "texts",
    ),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction",),
    "output": ("output",),
    "question": ("prompt", "instruction", "question", "query", "problem", "message_1", "inputs", "input"),
    "answer": (
        *("completion", "output", "response", "answer", "solution", "generated_solution", "message_2"),
        *("targets", "target"),
    ),
    "answers": ("answers", "completions"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt", "system_message"),
    "tools": ("tools", "functions"),
    "chosen": ("chosen", "preferred_output", "chosen_response", "response_j"),
    "label": ("label", "kto_tag"),
    "rejected": ("rejected", "non_preferred_output", "rejected_response", "rejected_messages", "response_k"),
}
"""The columns in which published data have what a shape reads, the first of which a row has; others have its name."""
PICTURES = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what is no text."""


@dataclass(frozen=True)
class Shape:
    """A published shape of rows: its name, what it needs and may have, how a row is read of these, and a remark that
    is counted for a row to which it applies."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[Values], Any]
    may: tuple[str, ...] = ()
    remark: Callable[[Values], tuple[str, int]] = lambda _: ("", 0)

    def columns_in(self, values: Values, given: Collection[str] = ()) -> dict[str, str] | None:
        """Return the columns of a row by what the shape reads of them, first those `given`; None if one is missing.

        Raises `InvalidValue` for a question or answer, if needed, that several columns may be.
        """
        found: dict[str, str] = {}
        for name in (*self.needs, *self.may):
            there = [column for column in COLUMNS.get(name, (name,)) if is_given(values.get(column))]
            there = [column for column in there if column in given] or there
            there = [column for column in there if column not in found.values()]
            if name in ("question", "answer"):
                there = there[:-1] if len(there) > 1 and there[-1] == "input" else there
                if len(there) > 1 and name in self.may:
                    continue  # it may be within the answers
                if len(there) > 1:
                    allowed = f"one of them, named by --columns {there[0]}=COLUMN"
                    raise InvalidValue.of("columns", " and ".join(there), allowed)
            if there:
                found[name] = there[0]
            elif name in self.needs:
                return None
        return found


def is_given(value: Any) -> bool:
    """Whether a row has a value."""
    return value is not None and value != []


def shape_of(values: Values, shapes: Sequence[Shape], given: Collection[str] = ()) -> tuple[Shape, dict[str, str]]:
    """Return the first shape of which a row has all that it needs, with the columns; raises `InvalidValue`."""
    unclear: InvalidValue | None = None
    for shape in shapes:
        try:
            columns = shape.columns_in(values, given)
        except InvalidValue as error:
            unclear = unclear or error
            continue
        if columns is not None:
            return shape, columns
    if unclear is not None:
        raise unclear
    there = (name if is_given(value) else f"{name} (empty)" for name, value in values.items())
    allowed = f"{needed(shapes)}; name others with --columns NAME=COLUMN"
    raise InvalidValue.of("columns", ", ".join(there) or "none", allowed)


def needed(shapes: Sequence[Shape]) -> str:
    """Return what shapes need, as text: of a column that has several names, the first."""
    return "; or ".join(dict.fromkeys(", ".join(COLUMNS.get(name, (name,))[0] for name in s.needs) for s in shapes))


@dataclass(frozen=True)
class Chat:
    """A conversation, the values that its chat template is given besides, such as tools, and its images in the order
    of their `IMAGE_PLACE`s: paths, or what the files hold."""

    messages: Messages
    values: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


def chat_of_row(values: Values, messages: Messages) -> Chat:
    """A conversation with the system message, the tools and the values for its template that a row has."""
    extra = dict(values.get("chat_template_kwargs") or {})
    tools = json_in(values.get("tools"), "tools")
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidValue.of("tools", tools, "a list of objects")
        extra["tools"] = list(map(as_function, tools))
    told = messages and messages[0].get("role") == SYSTEM
    return Chat([*([] if told else said(SYSTEM, text_in(values, "system"))), *messages], extra)


def _talk(values: Values) -> Chat:
    return chat_of_row(values, messages_in(values["messages"], "messages"))


def asked_in(values: Values, name: str) -> Messages:
    """Return the messages before an answer: the turns of a history, and those of a column, or of the request that it
    holds, as OpenAI has it; an `input` follows a text."""
    asked = values[name]
    if isinstance(asked, str) and values.get("input"):
        asked = f"{asked}\n\n{text_in(values, 'input')}"
    found = messages_in(asked["messages"] if isinstance(asked, Mapping) and "messages" in asked else asked, name)
    begun = isinstance(asked, str) and found and found[-1] == {"role": ASSISTANT, "content": ""}
    return messages_in(values.get("history") or [], "history") + (found[:-1] if begun else found)


def text_in(values: Values, name: str) -> str:
    """Return the text of a column, "" without one; raises `InvalidValue`."""
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue.of(name, value, "a text")
    return value or ""


def answer_in(values: Values, name: str) -> Messages:
    """Return the messages of an answer, with its thoughts if they are a column of their own."""
    value = values[name]
    if isinstance(value, list) and any(isinstance(one, str) for one in value):
        if len(value) > 1:
            raise InvalidValue.of(name, value, "one answer")
        value = value[0]
    found = messages_in(value, name, ASSISTANT)
    if thought := text_in(values, THOUGHT):
        found[-1] |= {THOUGHT: thought}
    return found


def _completed(question: str, answer: str) -> Callable[[Values], Chat]:
    return lambda values: chat_of_row(values, asked_in(values, question) + answer_in(values, answer))


def _called(values: Values) -> Chat:
    """The calls that answer a question, as in xLAM."""
    calls = json_in(values["answers"], "answers")
    if not isinstance(calls, list):
        raise InvalidValue.of("answers", calls, "a list of calls")
    message = {"role": ASSISTANT, "content": "", "tool_calls": list(map(as_function, calls))}
    return chat_of_row(values, [*asked_in(values, "question"), message])


CALLED = re.compile(r"<functioncall>\s*(\{\s*\"name\".*?\"arguments\":\s*)'?(.*?)'?\s*\}\s*$", re.DOTALL)


def _glaive(values: Values) -> Chat:
    """A conversation with a mark before each turn and calls in a notation of their own."""
    messages = messages_in(values["chat"], "messages")
    for message in messages:
        said = text_in(message, "content")
        text, mark, _ = said.partition("<functioncall>")
        if mark and message["role"] == ASSISTANT:
            found = CALLED.search(said)
            call = json_in(f"{found[1]}{found[2]}}}" if found else said, "chat")
            message |= {"content": text.strip(), "tool_calls": [as_function(call)]}
    return chat_of_row(dict(values) | {"system": text_in(values, "system").removeprefix("SYSTEM: ")}, messages)


def _tree(values: Values) -> Chat:
    """The conversation of the first of each message's ranked replies, as in OASST's trees."""
    message, messages = values["prompt"], list[Any]()
    while message:
        replies = message.get("replies") or [] if isinstance(message, Mapping) else None
        if not isinstance(replies, list) or not all(isinstance(one, Mapping) for one in replies):
            raise InvalidValue.of("prompt", message, "a message with a list of replies")
        messages.append({name: message.get(name) for name in ("role", "text")})
        ranked = [one for one in replies if isinstance(one.get("rank"), int | float)]
        message = min(ranked or replies, key=lambda one: one.get("rank") if ranked else 0, default=None)
    return chat_of_row({}, messages_in(messages, "prompt"))


def _spoken(values: Values) -> Chat:
    found = marked(text_in(values, "text"))
    if found is None:
        allowed = f"{needed(CHATS[:-1])}; or a text with marks of its turns (any text: --format text)"
        raise InvalidValue.of("columns", "text", allowed)
    return chat_of_row({}, found)


def _alone(values: Values) -> Chat:
    allowed = "conversations; rows of OASST are single messages: train on its file of trees, or on oasst_top1"
    raise InvalidValue.of("message_id", values["message_id"], allowed)


ASIDE = ("system", "tools", "chat_template_kwargs")
ALSO = ("history", THOUGHT, *ASIDE)
MARKED = Shape("turns in a text", ("text",), _spoken)
"""The shape of conversations that are one text, which has the columns of any text."""
CHATS = (
    Shape("Glaive", ("system", "chat"), _glaive, ("tools",)),
    Shape("messages", ("messages",), _talk, ASIDE),
    Shape("tree", ("message_tree_id", "prompt"), _tree),
    Shape("a message alone", ("message_id", "role", "text"), _alone),
    Shape("prompt and completion", ("prompt", "completion"), _completed("prompt", "completion"), ALSO),
    Shape("Alpaca", ("instruction", "output"), _completed("instruction", "output"), ("input", *ALSO)),
    Shape("question and answer", ("question", "answer"), _completed("question", "answer"), ("input", *ALSO)),
    Shape("calls", ("question", "answers", "tools"), _called, ("system",)),
    Shape("token ids", ("input_ids",), token_rows, ("labels", *MASKS, *PACKED)),
    MARKED,
)
"""The shapes of conversations."""

TEXTS = (Shape("text", ("text",), lambda values: text_in(values, "text")),)
"""The shape of texts."""


def _pair(values: Values) -> tuple[str, str]:
    return text_in(values, "source").strip(), text_in(values, "target").strip()


def _translation(values: Values) -> tuple[str, str]:
    """Both sides of a translation, an object of two texts by language."""
    both = values["translation"]
    if not isinstance(both, Mapping) or len(both) != 2:
        raise InvalidValue.of("translation", both, "an object of two texts; or name two columns as source and target")
    return _pair(dict(zip(("source", "target"), both.values(), strict=True)))


PAIRS = (Shape("pairs", ("source", "target"), _pair), Shape("translation", ("translation",), _translation))
"""The shapes of pairs."""


def _labelled(values: Values) -> tuple[str, str]:
    label = values["label"]
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise InvalidValue.of("label", label, "a text or a whole number")
    return str(label), text_in(values, "text").strip()


LABELS = (Shape("labelled texts", ("text", "label"), _labelled),)
"""The shape of texts with labels."""
