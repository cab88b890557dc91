"""The shapes in which conversations and preferences are published, recognised by their columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_schema.prepared import ShowConfig
from attn_schema.training import DataConfig

Values = Mapping[str, Any]
Messages = list[dict[str, Any]]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES: Mapping[str, str] = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
"""Roles of ShareGPT's format by the names that it gives them; other names are roles already."""
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


@dataclass(frozen=True)
class Shape:
    """A published shape of rows: its name, the columns that it needs and may have, and how a row is read."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[Values], Any]
    may: tuple[str, ...] = ()

    def left_aside(self, values: Values) -> set[str]:
        """Return the columns of a row that are not read."""
        return {name for name, value in values.items() if name not in {*self.needs, *self.may} and value is not None}


def shape_of(values: Values, shapes: Sequence[Shape]) -> Shape:
    """Return the first shape of which a row has all columns; raises `InvalidValue`."""
    for shape in shapes:
        if all(values.get(name) is not None for name in shape.needs):
            return shape
    allowed = "; or ".join(", ".join(shape.needs) for shape in shapes)
    raise InvalidValue.of("columns", ", ".join(values) or "none", allowed)


def said(role: str, content: str) -> Messages:
    """Return a conversation of one message; none of an empty content."""
    return [{"role": role, "content": content}] if content else []


def messages_in(value: Any, name: str, role: str = USER) -> Messages:
    """Return the messages of a column, a list of them or the text of one by `role`.

    Messages have role and content, or from and value, as ShareGPT has it; contents are texts or parts of text. Raises
    `InvalidValue` for anything else.
    """
    if isinstance(value, str):
        return said(role, value)
    if not isinstance(value, list):
        raise InvalidValue.of(name, value, "a text, or a list of messages")
    return [_message(message, f"{name}[{place}]") for place, message in enumerate(value)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidValue.of(place, message, "an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if "from" in kept and "value" in kept:
        given = str(kept.pop("from"))
        kept = {"role": ROLES.get(given, given), "content": kept.pop("value")} | kept
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(_part(part, f"{place}.content") for part in kept["content"])
    return kept


def _part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidValue.of(place, part, "parts of text; images and other parts are not trained on")


def _alpaca(values: Values) -> Messages:
    asked = "\n\n".join(text for text in (_text(values, "instruction"), _text(values, "input")) if text)
    return [*said(SYSTEM, _text(values, "system")), *said(USER, asked), _answer(_text(values, "output"))]


def _answer(text: str) -> dict[str, Any]:
    return {"role": ASSISTANT, "content": text}


def _text(values: Values, name: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue.of(name, value, "a text")
    return value or ""


def _completed(values: Values) -> Messages:
    return messages_in(values[PROMPT], PROMPT) + messages_in(values["completion"], "completion", ASSISTANT)


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Ready-made token ids, and for each whether it is a target."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


MASKS = ("attention_mask", "completion_mask", "assistant_masks")


def _tokens(values: Values) -> TokenRow:
    """Token ids as transformers and TRL have them: `labels` are the ids themselves, or -100 where nothing is learned.

    Tokens at both ends of which the attention mask is 0 are padding.
    """
    columns = {name: values[name] for name in ("input_ids", "labels", *MASKS) if values.get(name) is not None}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if not isinstance(column, list) or not all(type(number) is int for number in column):
            raise InvalidValue.of(name, column, "a list of integers")
        if len(column) != len(ids):
            raise InvalidValue.of(name, f"{len(column)} numbers", f"{len(ids)}, as many as input_ids")
        if name in MASKS and not {0, 1}.issuperset(column):
            raise InvalidValue.of(name, column, "0 or 1 for each token")
    for place, (token, label) in enumerate(zip(ids, columns.get("labels", ids), strict=True)):
        if label not in (token, IGNORED):
            raise InvalidValue.of(f"labels[{place}]", label, f"{token}, the id at this place, or {IGNORED}")
    real = columns.get("attention_mask", [1] * len(ids))
    first, last = (real.index(1), len(real) - real[::-1].index(1)) if 1 in real else (0, 0)
    if 0 in real[first:last]:
        raise InvalidValue.of("attention_mask", real, "zeros for padding at the ends only")
    marks = [columns.get(name, [1] * len(ids)) for name in MASKS[1:]]
    marks.append([int(label != IGNORED) for label in columns.get("labels", ids)])
    learned = tuple(all(each) for each in zip(*marks, strict=True))
    return TokenRow(tuple(ids[first:last]), learned[first:last])


CHATS = (
    Shape("messages", ("messages",), lambda values: messages_in(values["messages"], "messages")),
    Shape("ShareGPT", ("conversations",), lambda values: messages_in(values["conversations"], "conversations")),
    Shape("prompt and completion", (PROMPT, "completion"), _completed),
    Shape("Alpaca", ("instruction", "output"), _alpaca, ("input", "system")),
    Shape("token ids", ("input_ids",), _tokens, ("labels", *MASKS)),
)
"""The shapes of conversations."""


def _preference(values: Values) -> tuple[Messages, Messages]:
    """The two conversations of a row; a prompt that both begin with is not said twice."""
    both = [messages_in(values[name], name, ASSISTANT) for name in (CHOSEN, REJECTED)]
    prompt = messages_in(values[PROMPT], PROMPT) if values.get(PROMPT) is not None else []
    within = all(any(message.get("role") == USER for message in answers) for answers in both)
    if not prompt and not within:
        raise InvalidValue.of(PROMPT, values.get(PROMPT), "a prompt, in a column of its own or in chosen and rejected")
    if prompt and all(answers[: len(prompt)] == prompt for answers in both):
        prompt = []
    elif prompt and any(answers[0].get("role") == USER for answers in both if answers):
        raise InvalidValue.of(PROMPT, "another prompt than chosen and rejected begin with", "the same, or only answers")
    one, other = ([*prompt, *answers] for answers in both)
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return _last_learned(one, common), _last_learned(other, common)


def _last_learned(conversation: Messages, common: int) -> Messages:
    """Only what differs is compared: answers that both conversations share are not learned."""
    return [
        message | {"weight": 0} if place < common and message.get("role") == ASSISTANT else message
        for place, message in enumerate(conversation)
    ]


def _judged(values: Values) -> tuple[Messages | None, Messages | None]:
    """The conversation of a row as the chosen one if it is labelled as desirable, else as the rejected one."""
    label = values["label"]
    if label not in (0, 1):
        raise InvalidValue.of("label", label, "true or false")
    asked = messages_in(values[PROMPT], PROMPT)
    judged = _last_learned([*asked, *messages_in(values["completion"], "completion", ASSISTANT)], len(asked))
    return (judged, None) if label else (None, judged)


PREFERENCES = (
    Shape("preferences", (CHOSEN, REJECTED), _preference, (PROMPT,)),
    Shape("labelled answers", (PROMPT, "completion", "label"), _judged),
)
"""The shapes of preferences."""


TEXTS = (Shape("text", ("text",), lambda values: _text(values, "text")),)
"""The shape of texts."""
NAMES = sorted({name for shape in (*CHATS, *PREFERENCES, *TEXTS) for name in (*shape.needs, *shape.may)})
"""The names of all columns of these shapes."""


@dataclass
class Reading:
    """How rows are read: `columns` with other names, by the names of the shapes, and whether those that cannot be read
    are left out; and what was found in reading: shapes, unused columns, and the number of rows by a remark."""

    columns: Mapping[str, str] = field(default_factory=dict)
    skip_broken: bool = False
    shapes: Counter[str] = field(default_factory=Counter)
    used: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    first_broken: str = ""
    _keys: set[object] = field(default_factory=set)

    @classmethod
    def of(cls, config: DataConfig | ShowConfig) -> Reading:
        """Return the reading of a config; raises `InvalidValue` for a column that no shape has."""
        columns = dict(given.split("=", 1) for given in config.columns)
        if unknown := sorted(columns.keys() - set(NAMES)):
            raise InvalidValue.of("config.data.columns", ", ".join(unknown), f"names among {', '.join(NAMES)}")
        return cls(columns, config.skip_broken)

    def read(self, values: Values, shapes: Sequence[Shape]) -> Any:
        """Return what the shape of a row reads of it; raises `InvalidValue` for a row of no shape."""
        if missing := sorted(set(self.columns.values()) - values.keys()):
            raise InvalidValue.of("columns", ", ".join(missing), f"the columns {', '.join(map(str, values))}")
        taken = {*self.columns, *self.columns.values()}
        renamed = {name: value for name, value in values.items() if name not in taken}
        renamed |= {name: values[column] for name, column in self.columns.items()}
        shape = shape_of(renamed, shapes)
        self.shapes[shape.name] += 1
        self.used |= {
            self.columns.get(name, name) for name in (*shape.needs, *shape.may) if renamed.get(name) is not None
        }
        self.aside |= shape.left_aside(renamed)
        return shape.read(renamed)

    def note(self, remark: str, count: int) -> None:
        """Count rows with a remark."""
        if count:
            self.dropped[remark] += count

    def seen(self, remark: str, key: object) -> None:
        """Count a row with a remark if an earlier one had the same key."""
        self.note(remark, int(key in self._keys))
        self._keys.add(key)

    def broken(self, error: InvalidValue) -> None:
        """Count a row that cannot be read, or raise the error."""
        if not self.skip_broken:
            raise error
        self.first_broken = self.first_broken or error.message
        self.dropped["left out, as they cannot be read"] += 1

    def __str__(self) -> str:
        columns = f", columns left aside: {', '.join(sorted(self.aside))}" if self.aside else ""
        broken = f", the first that cannot be read: {self.first_broken}" if self.first_broken else ""
        return "".join(f", {count} {reason}" for reason, count in self.dropped.items()) + broken + columns
