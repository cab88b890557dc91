"""The shapes in which conversations and preferences are published, recognised by their columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.chat_form import THOUGHT

from attn_train.data.token_rows import MASKS, PACKED, token_rows

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
            there = [column for column in COLUMNS.get(name, (name,)) if is_given(values.get(column))]
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


ASIDE = ("system", "tools", "chat_template_kwargs")
CHATS = (
    Shape("messages", ("messages",), _talk, ASIDE),
    Shape("prompt and completion", ("prompt", "completion"), _completed("prompt", "completion"), ASIDE),
    Shape("Alpaca", ("instruction", "output"), _completed("instruction", "output"), ("input", *ASIDE)),
    Shape("question and answer", ("question", "answer"), _completed("question", "answer"), ("input", *ASIDE)),
    Shape("token ids", ("input_ids",), token_rows, ("labels", *MASKS, *PACKED)),
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


def _better(values: Values, columns: tuple[str, str]) -> int | None:
    """Which of two answers has the higher number, None for neither."""
    one, other = (values[name] for name in columns)
    for name, number in zip(columns, (one, other), strict=True):
        if not isinstance(number, int | float) or math.isnan(number):
            raise InvalidValue.of(name, number, "a number")
    return None if one == other else int(other > one)


def _chosen(best: int | None, prompt: Any, answers: Sequence[Any]) -> Judged:
    if best is None:
        return None, None
    return _preference({"question": prompt, "chosen": answers[best], "rejected": answers[1 - best]})


def _scored(values: Values) -> Judged:
    """An answer to a question with a higher score than another, as in OpenAI's WebGPT."""
    asked = values["question"]
    asked = asked.get("full_text") if isinstance(asked, Mapping) else asked
    return _chosen(_better(values, ("score_0", "score_1")), asked, [values["answer_0"], values["answer_1"]])


def _summarized(values: Values) -> Judged:
    """The better of two summaries, of a post in the form of Stiennon et al. 2020 (arXiv 2009.01325) or an article."""
    info, texts = values["info"], values["summaries"]
    if not isinstance(info, Mapping) or not (info.get("post") or info.get("article")):
        raise InvalidValue.of("info", info, "an object with a post or an article")
    if not isinstance(texts, list) or len(texts) != 2 or not all(isinstance(one, Mapping) for one in texts):
        raise InvalidValue.of("summaries", texts, "two objects with a text")
    if values["choice"] not in (0, 1):
        raise InvalidValue.of("choice", values["choice"], "0 or 1")
    head = f"SUBREDDIT: r/{info['subreddit']}\n" if info.get("subreddit") else ""
    head += f"TITLE: {info['title']}\n" if info.get("title") else ""
    body = f"POST: {info['post']}" if info.get("post") else f"ARTICLE: {info['article']}"
    return _chosen(int(values["choice"]), f"{head}{body}\nTL;DR:", [one.get("text") for one in texts])


def _ranked(values: Values) -> Judged:
    """The best and the worst of ranked answers, as in Nectar."""
    answers = values["answers"]
    known = isinstance(answers, list) and all(isinstance(one, Mapping) for one in answers)
    if not known or not answers or not all(isinstance(one.get("rank"), int | float) for one in answers):
        raise InvalidValue.of("answers", answers, "a list of objects with answer and rank")
    best, worst = (pick(answers, key=lambda one: float(one["rank"])) for pick in (min, max))
    both = [best.get("answer"), worst.get("answer")]
    return _chosen(0 if best["rank"] < worst["rank"] else None, values["question"], both)


def _between(values: Values) -> tuple[str, int]:
    answers = values["answers"]
    more = isinstance(answers, list) and len(answers) > 2
    return "with answers between the best and the worst, which are not compared", int(more)


WINNERS = ("winner_model_a", "winner_model_b")


def _fought(values: Values) -> Judged:
    """The better of two conversations whose turns are lists of texts in JSON, as in the arena's 55k."""
    names = ("prompt", "response_a", "response_b")
    asked, *both = (json_in(values[name], name) for name in names)
    for name, turns in zip(names, (asked, *both), strict=True):
        if not isinstance(turns, list) or len(turns) != len(asked):
            raise InvalidValue.of(name, turns, "a list of texts in JSON, as many as in prompt")
    talks = [[text or "" for pair in zip(asked, turns, strict=True) for text in pair] for turns in both]
    best = _better(values, WINNERS)
    return (None, None) if best is None else _preference({"chosen": talks[best], "rejected": talks[1 - best]})


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
    Shape("WebGPT", ("question", "answer_0", "answer_1", "score_0", "score_1"), _scored),
    Shape("summaries", ("info", "summaries", "choice"), _summarized),
    Shape("ranked answers", ("question", "answers"), _ranked, remark=_between),
    Shape(
        "arena of texts",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"),
        _fought,
        ("winner_tie",),
    ),
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
