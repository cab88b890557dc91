"""Conversation data: rows of messages, or of prompts with preferred and rejected answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import ControlTokenPlaceholders, check_messages

from attn_train.checking import require_wanted
from attn_train.data.shapes import CHATS, PREFERENCES, Notes, Shape, shape_of
from attn_train.data.token_shards.inputs import input_files, rows_of, units_of

FIELD = "config.data.dataset"
ASSISTANT = "assistant"
MESSAGES = "messages"
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Columns, as in TRL's conversational formats; each is a list of messages."""

WHOLE = 1 << 62
"""More bytes than a file has, so that it is one unit."""
WEIGHT = "weight"
"""The key of an answer that is 0 if the answer is not learned, as in OpenAI's format for fine-tuning; 1 by default."""

Messages = Sequence[Mapping[str, Any]]
"""Messages with a role, a content and, for answers, optionally a weight."""


@dataclass(frozen=True, eq=False)
class TokenizedChat:
    """A conversation as input ids and target ids, one ahead; targets outside of the assistant's answers are IGNORED."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def answered(self) -> int:
        """The number of target tokens in answers."""
        return sum(target != IGNORED for target in self.targets)


@dataclass(frozen=True, eq=False)
class PreferencePair:
    """Two conversations that differ in their answers; `chosen` is the preferred one."""

    chosen: TokenizedChat
    rejected: TokenizedChat


def read_rows(path: Path, shapes: Sequence[Shape], notes: Notes) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row of a file, or of the files below a folder, and what its shape reads of it.

    Raises `InvalidValue`, with the place, for rows of no shape, and as `input_files` and `require_wanted` do.
    """
    for file in input_files([str(path)]):
        for row in (row for unit in units_of(file, "", WHOLE) for row in rows_of(unit)):
            require_wanted()
            try:
                shape = shape_of(row.values, shapes)
                notes.aside |= shape.left_aside(row.values)
                yield row.place, shape.read(row.values)
            except InvalidValue as error:
                raise InvalidValue.of(FIELD, row.place, f"a row of a known shape: {error.message}") from error


def checked_chats(path: Path, notes: Notes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the place and the messages of each conversation; raises as `read_rows` and `check_conversation` do."""
    for place, messages in read_rows(path, CHATS, notes):
        yield place, _checked(messages, place)


def checked_preferences(path: Path, notes: Notes) -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
    """Yield the place and both conversations of each row; those in which nothing is preferred are left out, and counted
    in `notes`. Raises as `checked_chats` does."""
    seen = set()
    for place, both in read_rows(path, PREFERENCES, notes):
        chosen, rejected = (_checked(messages, place) for messages in both)
        if chosen == rejected:
            notes.dropped["left out, as both answers are equal"] += 1
        elif not (chosen[-1]["content"].strip() and rejected[-1]["content"].strip()):
            notes.dropped["left out, as an answer is empty"] += 1
        else:
            prompt = json.dumps([one for one in chosen if one in rejected])
            notes.dropped["with a prompt that others have, too"] += prompt in seen
            seen.add(prompt)
            yield place, [chosen, rejected]


def _checked(messages: Sequence[Any], place: str) -> list[dict[str, Any]]:
    try:
        return check_conversation(messages)
    except InvalidValue as error:
        raise InvalidValue.of(FIELD, place, f"messages with a role and a content: {error.message}") from error


def check_conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages of `role`, `content` and, for those of the assistant, `weight`, 0 or 1.

    A weight is left out where it is 1. Raises `InvalidValue` for other weights and keys, and for what `check_messages`
    refuses.
    """
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidValue.of(f"messages[{place}]", message, "an object with role and content")
        for key in message.keys() - {"role", "content", WEIGHT}:
            if message[key] is not None:
                raise InvalidValue.of(f"messages[{place}].{key}", message[key], f"only role, content and {WEIGHT}")
        weight, field = message.get(WEIGHT), f"messages[{place}].{WEIGHT}"
        if weight is None:
            continue
        if message.get("role") != ASSISTANT:
            raise InvalidValue.of(field, weight, f"none for the role {message.get('role')}: only answers are learned")
        if isinstance(weight, bool) or weight not in (0, 1):
            raise InvalidValue.of(field, weight, "0 or 1")
    plain = check_messages([{key: one[key] for key in ("role", "content") if key in one} for one in messages])
    return [one | ({WEIGHT: 0} if given.get(WEIGHT) == 0 else {}) for one, given in zip(plain, messages, strict=True)]


def tokenized_chats(tokenizer: Tokenizer, messages: Messages, place: str) -> list[TokenizedChat]:
    """Tokenize a conversation with the chat template; targets are the assistant's messages and their end tokens, except
    those of weight 0.

    If the template writes earlier messages differently once more follow, as those do that leave out the thoughts of
    earlier answers, each answer becomes a conversation of its own that ends with it. Raises `InvalidValue` for a
    conversation without an answer, and for an answer that does not begin with the generation prompt.
    """
    weights = [message.get(WEIGHT, 1) for message in messages]
    learned = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT and weights[n]]
    if not learned:
        raise InvalidValue.of(FIELD, place, f"a message with the role {ASSISTANT} whose weight is not 0")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    said = tokenizer.with_placeholders(plain)

    def rendered(count: int, *, asked: bool = False) -> str:
        return tokenizer.render_chat(said.values[0][:count], add_generation_prompt=asked)

    spans, texts = [], []
    for number in learned:
        before, text = (
            rendered(number, asked=True) if number else _before_first_answer(tokenizer, place),
            rendered(number + 1),
        )
        if not text.startswith(before):
            allowed = "a chat template that begins each answer with its generation prompt"
            raise InvalidValue.of(FIELD, place, allowed)
        spans.append((len(before), len(text)))
        texts.append(text)
    whole = rendered(len(messages))
    if all(whole.startswith(text) for text in texts):
        return [_marked(tokenizer, said, whole, spans)]
    return [_marked(tokenizer, said, text, [span]) for text, span in zip(texts, spans, strict=True)]


def _marked(
    tokenizer: Tokenizer, said: ControlTokenPlaceholders, text: str, spans: Sequence[tuple[int, int]]
) -> TokenizedChat:
    """Tokenize a rendered text; targets are the tokens in `spans` of characters, up to the first that ends an answer.

    A token never reaches over the beginning of an answer, as none does when a model writes it.
    """
    ids: list[int] = []
    start, rest = 0, tokenizer.encode_rendered(said, text)
    learned: list[int] = []
    for span in spans:
        bounds = []
        for cut in span:
            piece = tokenizer.encode_rendered(said, text[start:cut], within=bool(start))
            if rest[: len(piece)] == piece:
                bounds.append(len(ids) + len(piece))
                continue
            ids, start = ids + piece, cut
            rest = tokenizer.encode_rendered(said, text[start:], within=True)
            bounds.append(len(ids))
        answer = (ids + rest)[bounds[0] : bounds[1]]
        ends = (place for place, token in enumerate(answer, start=1) if token in tokenizer.end_ids)
        learned += range(bounds[0], bounds[0] + next(ends, len(answer)))
    ids += rest
    targets = [IGNORED] * len(ids)
    for place in learned:
        targets[place - 1] = ids[place]
    return TokenizedChat(tuple(ids[:-1]), tuple(targets[:-1]))


MARKS = "\U000f8000", "\U000f8001", "\U000f8002"
"""Characters of a private plane, by which messages are found again in what a template renders."""


def _before_first_answer(tokenizer: Tokenizer, place: str) -> str:
    """Return the text that the template writes before an answer that no message precedes.

    It ends with what it writes before any answer (the generation prompt), and may begin with a default system message,
    which is no part of the answer. Raises `InvalidValue` if the template does not write that prompt there.
    """
    answer = [{"role": ASSISTANT, "content": MARKS[0]}]
    asked = [{"role": "user", "content": MARKS[1]}]
    before = tokenizer.render_chat(answer, add_generation_prompt=False).partition(MARKS[0])[0]
    question = tokenizer.render_chat(asked, add_generation_prompt=False)
    prompt = tokenizer.render_chat(asked, add_generation_prompt=True).removeprefix(question)
    found = before.rfind(prompt)
    if not prompt or found < 0:
        allowed = "a user's message before the first answer, as this chat template writes none without"
        raise InvalidValue.of(FIELD, f"{place}, which begins with the role {ASSISTANT}", allowed)
    return before[: found + len(prompt)]


def read_chats(path: Path, tokenizer: Tokenizer, notes: Notes | None = None) -> list[TokenizedChat]:
    """Read and tokenize conversations; raises as `checked_chats` and `tokenized_chats` do."""
    require_template(tokenizer)
    rows = checked_chats(path, Notes() if notes is None else notes)
    return [chat for place, messages in rows for chat in tokenized_chats(tokenizer, messages, place)]


def read_preferences(path: Path, tokenizer: Tokenizer, notes: Notes | None = None) -> list[PreferencePair]:
    """Read and tokenize preferences; raises as `checked_preferences` and `tokenized_chats` do."""
    require_template(tokenizer)
    pairs = []
    for place, both in checked_preferences(path, Notes() if notes is None else notes):
        chosen, rejected = (tokenized_chats(tokenizer, messages, place)[-1] for messages in both)
        pairs.append(PreferencePair(chosen, rejected))
    return pairs


def require_template(tokenizer: Tokenizer) -> None:
    """Raise `UserError` for a tokenizer without a chat template, or whose template ends no answer with a token that
    ends a generation: a model that learns from it would never stop."""
    if tokenizer.settings.chat_template is None:
        raise UserError("the tokenizer has no chat template, which conversations need")
    turns = [{"role": role, "content": mark} for role, mark in zip(("user", ASSISTANT), MARKS, strict=False)]
    try:
        text = tokenizer.render_chat(turns, add_generation_prompt=False).partition(MARKS[1])[2]
    except UserError:
        return  # it accepts other conversations
    if not tokenizer.end_ids.intersection(tokenizer.encode(text, add_special=False)):
        known = ", ".join(repr(tokenizer.token(end)) for end in sorted(tokenizer.end_ids)) or "none"
        raise UserError(
            f"the chat template ends an answer with {text!r}, in which no token ends a generation (those that do: "
            f"{known}), so the model would never stop: set eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json to the token that the template writes there, or let it write one that does"
        )
