"""The shapes in which conversations and preferences are published, recognised by their columns."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_schema.chat_form import THOUGHT
from attn_schema.prepared import PrepareConfig, ShowConfig
from attn_schema.training import DataConfig

Values = Mapping[str, Any]
Messages = list[dict[str, Any]]

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES: Mapping[str, str] = (
    {"human": USER}
    | dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), ASSISTANT)
    | dict.fromkeys(("observation", "function"), TOOL)
)
"""Roles by the names that ShareGPT's format and its kin give them; other names are roles already."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "data"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction",),
    "output": ("output",),
    "question": ("prompt", "instruction", "question", "query", "problem", "inputs", "input"),
    "answer": ("completion", "output", "response", "answer", "solution", "targets"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "chosen": ("chosen", "preferred_output", "chosen_response", "response_j"),
    "rejected": ("rejected", "non_preferred_output", "rejected_response", "response_k"),
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

        Raises `InvalidValue` for a question or answer that several columns may be.
        """
        found: dict[str, str] = {}
        for name in (*self.needs, *self.may):
            there = [column for column in COLUMNS.get(name, (name,)) if _is_given(values.get(column))]
            there = [column for column in there if column in given] or there
            there = [column for column in there if column not in found.values()]
            if name in ("question", "answer"):
                there = there[:-1] if len(there) > 1 and there[-1] == "input" else there
                if len(there) > 1:
                    allowed = f"one of them, named by --columns {there[0]}=COLUMN"
                    raise InvalidValue.of("columns", " and ".join(there), allowed)
            if there:
                found[name] = there[0]
            elif name in self.needs:
                return None
        return found


def _is_given(value: Any) -> bool:
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
    there = (name if _is_given(value) else f"{name} (empty)" for name, value in values.items())
    raise InvalidValue.of("columns", ", ".join(there) or "none", needed(shapes))


def needed(shapes: Sequence[Shape]) -> str:
    """Return what shapes need, as text."""
    return "; or ".join(", ".join("/".join(COLUMNS.get(name, (name,))) for name in shape.needs) for shape in shapes)


@dataclass(frozen=True)
class Chat:
    """A conversation, and the values that its chat template is given besides, such as tools."""

    messages: Messages
    values: Mapping[str, Any] = field(default_factory=dict)


def said(role: str, content: str) -> Messages:
    """Return a conversation of one message; none of an empty content that is no answer."""
    return [{"role": role, "content": content}] if content or role == ASSISTANT else []


HUMAN = re.compile(r"\n\n(Human|Assistant):")
"""What begins the turns of Anthropic's HH, whose conversations are texts."""


def messages_in(value: Any, name: str, role: str = USER) -> Messages:
    """Return the messages of a column, a list of them, one, or the text of one by `role`; texts are turns, from the
    user's on.

    Messages have role and content, or from and value, as ShareGPT has it; contents are texts or parts of text. Raises
    `InvalidValue` for anything else.
    """
    if isinstance(value, str):
        if not value.startswith("\n\nHuman:"):
            return said(role, value)
        _, *turns = HUMAN.split(value)
        speakers = {"Human": USER, "Assistant": ASSISTANT}
        pairs = zip(turns[::2], turns[1::2], strict=True)
        return [{"role": speakers[speaker], "content": text.strip()} for speaker, text in pairs]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise InvalidValue.of(name, value, "a text, or a list of messages")
    if value and all(isinstance(turn, str) for turn in value):
        return [{"role": (USER, ASSISTANT)[place % 2], "content": turn} for place, turn in enumerate(value)]
    return [_message(message, f"{name}[{place}]") for place, message in enumerate(value)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidValue.of(place, message, "an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if "from" in kept and "value" in kept:
        kept = {"role": str(kept.pop("from")), "content": kept.pop("value")} | kept
        if kept["role"] == "function_call":
            kept["function_call"] = json_in(kept.pop("content"), place)
    kept["role"] = ROLES.get(str(kept.get("role")), kept.get("role"))
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(_part(part, f"{place}.content") for part in kept["content"])
    if "train" in kept and "weight" not in kept:  # as axolotl has it
        kept["weight"] = int(kept.pop("train") is True)
    for name in ("thinking", "reasoning"):
        if name in kept:
            kept[THOUGHT] = kept.pop(name)
    if "function_call" in kept:  # as calls were before there could be several
        kept["tool_calls"] = [{"type": "function", "function": kept.pop("function_call")}]
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    return kept


def _part(part: Any, place: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidValue.of(place, part, "parts of text; images and other parts are not trained on")


def json_in(value: Any, name: str) -> Any:
    """Return a value, or what its text holds as JSON; raises `InvalidValue`."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidValue.of(name, value, "JSON") from error


def chat_of_row(values: Values, messages: Messages) -> Chat:
    """A conversation with the system message, the tools and the values for its template that a row has."""
    extra = dict(values.get("chat_template_kwargs") or {})
    tools = json_in(values.get("tools"), "tools")
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidValue.of("tools", tools, "a list of objects")
        extra["tools"] = [
            tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
            for tool in tools
        ]
    told = messages and messages[0].get("role") == SYSTEM
    return Chat([*([] if told else said(SYSTEM, _text(values, "system"))), *messages], extra)


def _talk(values: Values) -> Chat:
    return chat_of_row(values, messages_in(values["messages"], "messages"))


def _asked(values: Values, name: str) -> Messages:
    """The messages before an answer: those of a column, or of the request that it holds, as OpenAI has it."""
    asked = values[name]
    if isinstance(asked, str) and values.get("input"):
        asked = f"{asked}\n\n{_text(values, 'input')}"
    found = messages_in(asked["messages"] if isinstance(asked, Mapping) and "messages" in asked else asked, name)
    begun = isinstance(asked, str) and found and found[-1] == {"role": ASSISTANT, "content": ""}
    return found[:-1] if begun else found


def _text(values: Values, name: str) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidValue.of(name, value, "a text")
    return value or ""


def _completed(question: str, answer: str) -> Callable[[Values], Chat]:
    def read(values: Values) -> Chat:
        return chat_of_row(values, _asked(values, question) + messages_in(values[answer], answer, ASSISTANT))

    return read


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Ready-made token ids, and for each whether it is a target."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


MASKS = ("attention_mask", "completion_mask", "assistant_masks")
PACKED = ("seq_lengths", "position_ids")


def _tokens(values: Values) -> list[TokenRow]:
    """Token ids as transformers and TRL have them: `labels` are the ids themselves, or -100 where nothing is learned.

    Tokens at both ends of which the attention mask is 0 are padding. A row of several packed samples, by their lengths
    or by positions that begin anew, is as many rows.
    """
    columns = {name: values[name] for name in ("input_ids", "labels", *MASKS, *PACKED) if values.get(name) is not None}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if not isinstance(column, list) or not all(type(number) is int for number in column):
            raise InvalidValue.of(name, column, "a list of integers")
        if len(column) != len(ids) and name != "seq_lengths":
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
    lengths = columns.get("seq_lengths", [])
    if lengths and (sum(lengths) != len(ids) or min(lengths) < 1):
        raise InvalidValue.of("seq_lengths", lengths, f"lengths above 0 whose sum is {len(ids)}")
    begins = [place for place in range(first + 1, last) if columns.get("position_ids", ids)[place] == 0]
    begins = list(accumulate(lengths))[:-1] if lengths else begins if "position_ids" in columns else []
    cuts = [first, *(place for place in begins if first < place < last), last]
    return [TokenRow(tuple(ids[start:stop]), learned[start:stop]) for start, stop in pairwise(cuts)]


ASIDE = ("system", "tools", "chat_template_kwargs")
CHATS = (
    Shape("messages", ("messages",), _talk, ASIDE),
    Shape("prompt and completion", ("prompt", "completion"), _completed("prompt", "completion"), ASIDE),
    Shape("Alpaca", ("instruction", "output"), _completed("instruction", "output"), ("input", *ASIDE)),
    Shape("question and answer", ("question", "answer"), _completed("question", "answer"), ("input", *ASIDE)),
    Shape("token ids", ("input_ids",), _tokens, ("labels", *MASKS, *PACKED)),
)
"""The shapes of conversations."""

Judged = tuple[Chat | None, Chat | None]


def _preference(values: Values) -> Judged:
    """The two conversations of a row; a prompt that both begin with is not said twice."""
    both = [messages_in(values[name], name, ASSISTANT) for name in ("chosen", "rejected")]
    within = all(any(message.get("role") == USER for message in answers) for answers in both)
    named = next((name for name in ("question", "messages") if name in values), None)
    prompt = [] if named is None or (within and named == "messages") else _asked(values, named)
    if not prompt and not within:
        raise InvalidValue.of("prompt", None, "a prompt, in a column of its own or in chosen and rejected")
    if prompt and all(answers[: len(prompt)] == prompt for answers in both):
        prompt = []
    elif prompt and any(answers[0].get("role") == USER for answers in both if answers):
        raise InvalidValue.of(
            "prompt", "another prompt than chosen and rejected begin with", "the same, or only answers"
        )
    one, other = (chat_of_row(values, [*prompt, *answers]) for answers in both)
    pairs = enumerate(zip(one.messages, other.messages, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(one.messages), len(other.messages)))
    return _last_learned(one, common), _last_learned(other, common)


def _last_learned(chat: Chat, common: int) -> Chat:
    """Only what differs is compared: answers that both conversations share are not learned."""
    messages = [
        message | {"weight": 0} if place < common and message.get("role") == ASSISTANT else message
        for place, message in enumerate(chat.messages)
    ]
    return replace(chat, messages=messages)


def _judged(values: Values) -> Judged:
    """The conversation of a row as the chosen one if it is labelled as desirable, else as the rejected one."""
    label = values["label"]
    if label not in (0, 1):
        raise InvalidValue.of("label", label, "true or false")
    asked = messages_in(values["prompt"], "prompt")
    answers = messages_in(values["completion"], "completion", ASSISTANT)
    judged = _last_learned(chat_of_row(values, [*asked, *answers]), len(asked) + bool(_text(values, "system")))
    return (judged, None) if label else (None, judged)


def _compared(
    name: str, asked: str, answers: Sequence[str], verdict: str, better: Mapping[str, int | None], *may: str
) -> Shape:
    """The shape of rows with a prompt, `asked`, or "" if both answers are conversations, and with a verdict, whose
    values say which answer is better, 0 or 1, None for neither.

    A verdict among what a row may have is by another measure; a `turn` is the last one that was compared.
    """

    def place(values: Values, column: str) -> int | None:
        if (text := str(values[column])) not in better:
            raise InvalidValue.of(column, values[column], f"one of {', '.join(better)}")
        return better[text]

    def read(values: Values) -> Judged:
        best = place(values, verdict)
        if best is None:
            return None, None
        both = [values[column] for column in answers]
        if "turn" in values:
            if type(values["turn"]) is not int or values["turn"] < 1:
                raise InvalidValue.of("turn", values["turn"], "a number from 1")
            both = [messages_in(talk, column)[: 2 * values["turn"]] for talk, column in zip(both, answers, strict=True)]
        row = {"chosen": both[best], "rejected": both[1 - best]} | ({"question": values[asked]} if asked else {})
        return _preference(row | {column: values[column] for column in ASIDE if column in values})

    def remark(values: Values) -> tuple[str, int]:
        others = {place(values, column) for column in may if column != "turn" and column in values}
        return "in which another column prefers the other answer", int(not others <= {place(values, verdict)})

    return Shape(name, (*([asked] if asked else []), *answers, verdict), read, (*may, *ASIDE), remark)


CHOICE = {"0": 0, "1": 1}
STRENGTH = {str(number): None if number == 0 else int(number > 0) for number in range(-3, 4)}
"""Which of two answers is better by HelpSteer's strength of a preference."""
WINNER = {"model_a": 0, "model_b": 1, "tie": None, "tie (bothbad)": None, "both_bad": None}
"""Which of two conversations is better by the winner of an arena."""
PREFERENCES = (
    Shape("preferences", ("chosen", "rejected"), _preference, ("question", "input", "messages", *ASIDE)),
    Shape("labelled answers", ("prompt", "completion", "label"), _judged, ASIDE),
    _compared("SHP", "history", ("human_ref_A", "human_ref_B"), "labels", {"1": 0, "0": 1}),
    _compared(
        "PKU-SafeRLHF", "prompt", ("response_0", "response_1"), "better_response_id", CHOICE, "safer_response_id"
    ),
    _compared("HelpSteer2", "prompt", ("response_1", "response_2"), "preference_strength", STRENGTH),
    _compared("HelpSteer3", "context", ("response1", "response2"), "overall_preference", STRENGTH),
    _compared("arena", "", ("conversation_a", "conversation_b"), "winner", WINNER, "turn"),
)
"""The shapes of preferences."""


TEXTS = (Shape("text", ("text",), lambda values: _text(values, "text")),)
"""The shape of texts."""


def _pair(values: Values) -> tuple[str, str]:
    return _text(values, "source").strip(), _text(values, "target").strip()


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
    return str(label), _text(values, "text").strip()


LABELS = (Shape("labelled texts", ("text", "label"), _labelled),)
"""The shape of texts with labels."""


def names_in(shapes: Sequence[Shape]) -> set[str]:
    """Return the names of all columns that shapes read."""
    return {column for shape in shapes for name in (*shape.needs, *shape.may) for column in COLUMNS.get(name, (name,))}


NAMES = sorted(names_in((*CHATS, *PREFERENCES, *TEXTS, *PAIRS, *LABELS)))
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
    _keys: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, config: DataConfig | ShowConfig | PrepareConfig) -> Reading:
        """Return the reading of a config; raises `InvalidValue` for a column that no shape has."""
        columns = dict(given.split("=", 1) for given in config.columns)
        if unknown := sorted(columns.keys() - set(NAMES)):
            raise InvalidValue.of("config.data.columns", ", ".join(unknown), f"names among {', '.join(NAMES)}")
        return cls(columns, config.skip_broken)

    def renamed(self, values: Values) -> dict[str, Any]:
        """Return the columns of a row by the names of the shapes; raises `InvalidValue` for one that is missing."""
        if missing := sorted(set(self.columns.values()) - values.keys()):
            raise InvalidValue.of("columns", ", ".join(missing), f"the columns {', '.join(map(str, values))}")
        taken = {*self.columns, *self.columns.values()}
        others = {name: value for name, value in values.items() if name not in taken}
        return others | {name: values[column] for name, column in self.columns.items()}

    def needed_of(self, columns: Sequence[str], shapes: Sequence[Shape]) -> list[str]:
        """Return those of a table's columns that shapes may read; raises `InvalidValue` if they have not what one
        needs."""
        names = self.renamed(dict.fromkeys(columns, True))
        known = [[COLUMNS.get(name, (name,)) for name in shape.needs] for shape in shapes]
        if not any(all(names.keys() & set(each) for each in needs) for needs in known):
            raise InvalidValue.of(
                "columns", ", ".join(columns), f"{needed(shapes)}; name others with --columns NAME=COLUMN"
            )
        read = names_in(shapes)
        self.aside |= names.keys() - read - set(PICTURES)
        return [self.columns.get(name, name) for name in names if name in read or name in PICTURES]

    def read(self, values: Values, shapes: Sequence[Shape]) -> Any:
        """Return what the shape of a row reads of it; raises `InvalidValue` for a row of no shape."""
        renamed = self.renamed(values)
        shape, found = shape_of(renamed, shapes, self.columns)
        if pictures := [name for name in PICTURES if _is_given(renamed.get(name))]:
            raise InvalidValue.of(
                "columns", ", ".join(pictures), "columns of text: images and sounds are not trained on"
            )
        self.shapes[shape.name] += 1
        self.used |= {self.columns.get(name, name) for name in found.values()}
        self.aside |= {name for name, value in renamed.items() if value is not None} - set(found.values())
        read = {name: renamed[column] for name, column in found.items()}
        self.note(*shape.remark(read))
        return shape.read(read)

    def note(self, remark: str, count: int) -> None:
        """Count rows with a remark."""
        if count:
            self.dropped[remark] += count

    def seen(self, remark: str, key: object) -> None:
        """Count a row with a remark if an earlier one had the same key."""
        self.note(remark, int(hash(key) in self._keys))
        self._keys.add(hash(key))

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
