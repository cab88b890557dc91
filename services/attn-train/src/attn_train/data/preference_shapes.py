"""The shapes in which preferences are published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attn_core.errors import InvalidValue

from attn_train.data.messages import ASSISTANT, USER, json_in, messages_in
from attn_train.data.shapes import ALSO, ASIDE, Chat, Shape, Values, answer_in, asked_in, chat_of_row, text_in

Judged = tuple[Chat | None, Chat | None]


def _preference(values: Values) -> Judged:
    """The two conversations of a row; a prompt that both begin with is not said twice."""
    both = [messages_in(values[name], name, ASSISTANT) for name in ("chosen", "rejected")]
    within = all(any(message.get("role") == USER for message in answers) for answers in both)
    named = next((name for name in ("question", "messages") if name in values), None)
    prompt = [] if named is None or (within and named == "messages") else asked_in(values, named)
    if not prompt and not within:
        allowed = "a prompt, in one column (which one: --columns question=COLUMN) or in chosen and rejected"
        raise InvalidValue.of("prompt", None, allowed)
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
    if "messages" in values:
        talk, learned = messages_in(values["messages"], "messages"), -1
    else:
        talk = asked_in(values, "question")
        learned = len(talk)
        talk += answer_in(values, "answer")
    chat = chat_of_row(values, talk)
    judged = _last_learned(chat, len(chat.messages) - 1 if learned < 0 else len(chat.messages) - len(talk) + learned)
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
        return _preference(row | {column: values[column] for column in ("input", *ASIDE) if column in values})

    def remark(values: Values) -> tuple[str, int]:
        others = {place(values, column) for column in may if column != "turn" and column in values}
        return "in which another column prefers the other answer", int(not others <= {place(values, verdict)})

    return Shape(name, (*([asked] if asked else []), *answers, verdict), read, (*may, "input", *ASIDE), remark)


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


RANKS = {"rank": -1, "pm_score": 1, "overall_score": 1, "rating": 1}
"""By which numbers answers are ranked, and whether the best has the highest."""


def _ranked(values: Values) -> Judged:
    """The best and the worst of ranked answers, as in Nectar, StackExchange and UltraFeedback."""
    answers = values["answers"]
    known = isinstance(answers, list) and answers and all(isinstance(one, Mapping) for one in answers)
    by = next((name for name in RANKS if name in answers[0]), "rank") if known else "rank"
    if not known or any(not isinstance(one.get(by), int | float) or math.isnan(one[by]) for one in answers):
        allowed = f"a list of objects with answer, text or response, and with {', '.join(RANKS)}"
        raise InvalidValue.of("answers", answers, allowed)
    best, worst = (pick(answers, key=lambda one: RANKS[by] * float(one[by])) for pick in (max, min))
    both = [next((one[key] for key in ("answer", "text", "response") if key in one), None) for one in (best, worst)]
    return _chosen(None if best[by] == worst[by] else 0, values["question"], both)


def _rated(values: Values) -> Judged:
    """The best and the worst of answers with as many ratings, as distilabel writes them."""
    texts, ratings = values["generations"], values["ratings"]
    if not isinstance(texts, list) or not isinstance(ratings, list) or len(texts) != len(ratings):
        raise InvalidValue.of("ratings", ratings, "a list with a number for each of generations")
    pairs = zip(texts, ratings, strict=True)
    return _ranked({**values, "answers": [{"text": text, "rating": rating} for text, rating in pairs]})


def _step(values: Values) -> Judged:
    """The two steps that go on with an answer, as in Step-DPO."""
    begun = text_in(values, "initial_reason_steps")
    both = {name: begun + text_in(values, name) for name in ("chosen", "rejected")}
    return _preference({"question": values["prompt"], **both})


def _answered(values: Values) -> Judged:
    """A conversation, and what is rejected in place of its last answer, as ms-swift has it."""
    chosen, other = (messages_in(values[name], name, ASSISTANT) for name in ("messages", "rejected"))
    within = any(message.get("role") == USER for message in other)
    return _preference(dict(values) | {"chosen": chosen, "rejected": other if within else [*chosen[:-1], *other]})


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
    Shape("steps", ("prompt", "initial_reason_steps", "chosen", "rejected"), _step),
    Shape("preferences", ("chosen", "rejected"), _preference, ("question", "input", "messages", "history", *ASIDE)),
    Shape("a rejected answer", ("messages", "rejected"), _answered, ASIDE),
    Shape("labelled conversations", ("messages", "label"), _judged, ASIDE),
    Shape("labelled answers", ("question", "answer", "label"), _judged, ("input", *ALSO)),
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
    Shape("rated answers", ("question", "generations", "ratings"), _rated),
    _compared("AlpacaFarm", "instruction", ("output_1", "output_2"), "preference", {"1": 0, "2": 1}),
    Shape(
        "arena of texts",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"),
        _fought,
        ("winner_tie",),
    ),
)
"""The shapes of preferences."""
