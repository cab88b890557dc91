"""Conversation data: rows of messages, or of prompts with preferred and rejected answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import ControlTokenPlaceholders, check_messages
from attn_schema.training import DataConfig

from attn_train.checking import require_wanted
from attn_train.data.shapes import CHATS, PREFERENCES, Reading, Shape, TokenRow
from attn_train.data.token_shards.inputs import input_files, rows_of, split_files, units_of
from attn_train.tasks.base import split_validation

FIELD = "config.data.dataset"
ASSISTANT = "assistant"
MESSAGES = "messages"
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Columns, as in TRL's conversational formats; each is a list of messages."""

Example = TypeVar("Example")
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
    """Two conversations that differ in their answers, `chosen` the preferred one; or one alone, if it is labelled."""

    chosen: TokenizedChat | None
    rejected: TokenizedChat | None

    @property
    def chats(self) -> list[TokenizedChat]:
        """The conversations."""
        return [chat for chat in (self.chosen, self.rejected) if chat is not None]


def read_rows(files: Sequence[Path], shapes: Sequence[Shape], reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row of files, and what its shape reads of it.

    Raises `InvalidValue`, with the place, for rows of no shape, unless they are skipped, and as `require_wanted` does.
    """
    for file in files:
        for row in (
            row for unit in units_of(file, "", WHOLE) for row in rows_of(unit, lines=True, broken=reading.broken)
        ):
            require_wanted()
            try:
                found = reading.read(row.values, shapes)
            except InvalidValue as error:
                reading.broken(InvalidValue.of(FIELD, row.place, f"a row of a known shape: {error.message}"))
                continue
            yield row.place, found


def checked_chats(files: Sequence[Path], reading: Reading) -> Iterator[tuple[str, list[dict[str, Any]] | TokenRow]]:
    """Yield the place of each conversation and its messages, or its tokens; raises as `read_rows` and
    `check_conversation` do."""
    for place, found in read_rows(files, CHATS, reading):
        for checked in _checked([found], place, reading):
            yield place, checked[0]


def checked_preferences(
    files: Sequence[Path], reading: Reading
) -> Iterator[tuple[str, list[list[dict[str, Any]] | None]]]:
    """Yield the place and both conversations of each row, None for one that a labelled row lacks; rows in which nothing
    is preferred are left out, and counted. Raises as `checked_chats` does."""
    for place, both in read_rows(files, PREFERENCES, reading):
        for chosen, rejected in _checked(both, place, reading):
            given = [one for one in (chosen, rejected) if one is not None]
            if chosen == rejected:
                reading.dropped["left out, as both answers are equal"] += 1
            elif not all(one[-1]["content"].strip() for one in given):
                reading.dropped["left out, as an answer is empty"] += 1
            else:
                prompt = json.dumps([one for one in given[0] if one in given[-1]])
                reading.seen("with a prompt that others have, too", prompt)
                yield place, [chosen, rejected]


def _checked(conversations: Sequence[Any], place: str, reading: Reading) -> list[list[Any]]:
    """Return a list of the checked conversations of a row; an empty one if the row is skipped."""
    try:
        return [[check_conversation(one) if isinstance(one, list) else one for one in conversations]]
    except InvalidValue as error:
        reading.broken(InvalidValue.of(FIELD, place, f"messages with a role and a content: {error.message}"))
        return []


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


def read_splits(
    data: DataConfig, read: Callable[[Sequence[Path], Reading], Iterable[Example]]
) -> tuple[list[Example], list[Example], str]:
    """Return the training and validation examples of a config, and what was left out, as text.

    The examples for validation are those of files that are named so beside the training files, else the fraction at the
    end.
    """
    path, reading = Path(data.path or ""), Reading.of(data)
    files = input_files([str(path)])
    splits = split_files(path, files)
    training, kept = (list(read(splits[name], reading)) for name in ("train", "validation"))
    if not splits["validation"]:
        training, kept = map(list, split_validation(training, data.validation_fraction))
    unread = [file.name for file in files if file not in splits["train"] + splits["validation"]]
    return training, kept, f"{reading}{', files left aside: ' if unread else ''}{', '.join(unread)}"


def token_row_chat(row: TokenRow, tokenizer: Tokenizer, place: str) -> TokenizedChat:
    """Return ready-made token ids as a conversation; raises `InvalidValue` for ids that are not in the vocabulary."""
    wrong = [token for token in row.ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise InvalidValue.of(FIELD, f"{place}: the token {wrong[0]}", f"0 to {tokenizer.vocab_size - 1}")
    pairs = zip(row.ids[1:], row.learned[1:], strict=True)
    return TokenizedChat(row.ids[:-1], tuple(token if learned else IGNORED for token, learned in pairs))


def read_chats(files: Sequence[Path], tokenizer: Tokenizer, reading: Reading) -> Iterator[TokenizedChat]:
    """Read and tokenize conversations; those in which no token is learned are left out, and counted in `reading`.

    Raises as `checked_chats` and `tokenized_chats` do.
    """
    templates = False
    for place, row in checked_chats(files, reading):
        if not isinstance(row, TokenRow) and not templates:
            require_template(tokenizer)
            templates = True
        try:
            if isinstance(row, TokenRow):
                found = [token_row_chat(row, tokenizer, place)]
            else:
                found = tokenized_chats(tokenizer, row, place)
        except InvalidValue as error:
            reading.broken(error)
            continue
        for chat in found:
            if chat.answered:
                reading.seen("that others equal", (chat.inputs, chat.targets))
                yield chat
            else:
                reading.note("left out, as no token of them is learned", 1)


def read_preferences(files: Sequence[Path], tokenizer: Tokenizer, reading: Reading) -> Iterator[PreferencePair]:
    """Read and tokenize preferences; raises as `checked_preferences` and `tokenized_chats` do."""
    require_template(tokenizer)
    for place, both in checked_preferences(files, reading):
        try:
            chosen, rejected = (
                None if messages is None else tokenized_chats(tokenizer, messages, place)[-1] for messages in both
            )
        except InvalidValue as error:
            reading.broken(error)
            continue
        yield PreferencePair(chosen, rejected)


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
