"""Conversation data: JSON lines of messages, or of prompts with preferred and rejected answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UserError
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import check_messages
from attn_schema.text_files import files_of, lines_of, read_text

from attn_train.checking import require_wanted

FIELD = "config.data.dataset"
ASSISTANT = "assistant"
MESSAGES = "messages"
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
"""Columns, as in TRL's conversational formats; each is a list of messages."""

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


def read_lines(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, list[dict[str, Any]]]]]:
    """Yield the number and the columns of each line of a .jsonl file, or of the files of a folder in sorted order.

    Each line must be a JSON object with exactly these columns, each a list of messages of `check_conversation`; for
    other lines raises `InvalidValue` with the file and the line. Raises as `require_wanted` does.
    """
    for file in files_of(path):
        for number, line in enumerate(lines_of(read_text(file, FIELD)), start=1):
            require_wanted()
            if line.strip():
                yield number, _columns(line, columns, f"{file.name}, line {number}")


def _columns(line: str, columns: Sequence[str], place: str) -> dict[str, list[dict[str, Any]]]:
    wanted = " and ".join(columns)
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise InvalidValue.of(FIELD, place, f"JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidValue.of(FIELD, place, f"an object with {wanted}")
    for name in values:
        if name not in columns:
            raise InvalidValue.of(FIELD, f"column {name!r} in {place}", wanted)
    for name in columns:
        if not isinstance(values.get(name), list):
            raise InvalidValue.of(FIELD, f"{place} without a list {name!r}", f"a list of messages in {wanted}")
    try:
        return {name: check_conversation(values[name]) for name in columns}
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


def tokenized_chat(tokenizer: Tokenizer, messages: Messages, place: str) -> TokenizedChat:
    """Tokenize a conversation with the chat template; targets are the assistant's messages and their end tokens, except
    those of weight 0.

    Raises `InvalidValue` for a conversation without an answer, and for a template that formats earlier messages
    differently once more messages follow.
    """
    weights = [message.get(WEIGHT, 1) for message in messages]
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    targets = [IGNORED] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT or not weights[number]:
            continue
        begins = (
            tokenizer.encode_chat(messages[:number], add_generation_prompt=True)
            if number
            else _before_first_answer(tokenizer, place)
        )
        until = tokenizer.encode_chat(messages[: number + 1], add_generation_prompt=False)
        if whole[: len(until)] != until or until[: len(begins)] != begins:
            allowed = "a chat template that does not change earlier messages when more messages follow"
            raise InvalidValue.of(FIELD, place, allowed)
        for position in range(len(begins), len(until)):
            targets[position - 1] = whole[position]
            if whole[position] in tokenizer.end_ids:
                break
    chat = TokenizedChat(tuple(whole[:-1]), tuple(targets[:-1]))
    if not chat.answered:
        raise InvalidValue.of(FIELD, place, f"a message with the role {ASSISTANT} whose weight is not 0")
    return chat


MARKS = "\U000f8000", "\U000f8001", "\U000f8002"
"""Characters of a private plane, by which messages are found again in what a template renders."""


def _before_first_answer(tokenizer: Tokenizer, place: str) -> list[int]:
    """Return the tokens that the template writes before an answer that no message precedes.

    They end with what it writes before any answer (the generation prompt), and may begin with a default system message,
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
    return tokenizer.encode(before[: found + len(prompt)], add_special=False)


def read_chats(path: Path, tokenizer: Tokenizer) -> list[TokenizedChat]:
    """Read and tokenize lines with a column `messages`; raises as `read_lines` and `tokenized_chat` do."""
    require_template(tokenizer)
    return [
        tokenized_chat(tokenizer, values[MESSAGES], f"{path.name}, line {number}")
        for number, values in read_lines(path, (MESSAGES,))
    ]


def read_preferences(path: Path, tokenizer: Tokenizer) -> list[PreferencePair]:
    """Read and tokenize lines with columns `prompt`, `chosen` and `rejected`; prompts must not contain answers."""
    require_template(tokenizer)
    pairs = []
    for number, values in read_lines(path, (PROMPT, CHOSEN, REJECTED)):
        place = f"{path.name}, line {number}"
        prompt = _without_answers(values[PROMPT])
        both = [tokenized_chat(tokenizer, prompt + values[name], place) for name in (CHOSEN, REJECTED)]
        pairs.append(PreferencePair(*both))
    return pairs


def _without_answers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for message in messages:
        if message["role"] == ASSISTANT:
            raise InvalidValue.of(
                FIELD, "an answer in a prompt", "prompts without answers, which belong into chosen and rejected"
            )
    return messages


def require_template(tokenizer: Tokenizer) -> None:
    """Raise `UserError` for a tokenizer without a chat template, or whose template ends every conversation with the
    beginning of an answer, which would be learned as the end of an answer."""
    if tokenizer.settings.chat_template is None:
        raise UserError("the tokenizer has no chat template, which conversations need")
    turns = [{"role": role, "content": mark} for role, mark in zip(("user", ASSISTANT, "user"), MARKS, strict=True)]
    try:
        last, followed = (tokenizer.render_chat(turns[:count], add_generation_prompt=False) for count in (2, 3))
    except UserError:
        return  # it accepts other conversations
    if not followed.partition(MARKS[1])[2].startswith(last.partition(MARKS[1])[2]):
        raise UserError(
            "the chat template writes another end of an answer if a message follows: it must write the beginning of "
            "the next answer only with add_generation_prompt"
        )
