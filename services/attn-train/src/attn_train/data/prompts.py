"""Rows of prompts, which a model answers itself, with the columns that rewards need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer

from attn_train.data.conversations import check_conversation
from attn_train.data.messages import ASSISTANT, messages_in
from attn_train.data.reading import Reading, require_texts
from attn_train.data.rendering import FIELD, require_template
from attn_train.data.shapes import Chat, chat_of_row
from attn_train.data.token_shards.inputs import Row

PROMPT = "prompt"


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as token ids and as the dataset has it, with the place and the columns of its row."""

    ids: tuple[int, ...]
    given: Any
    place: str
    columns: Mapping[str, Any]


def prompt_rows(
    rows: Iterable[Row], columns: Sequence[str], needs: Collection[str], reading: Reading
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the columns of each row, under the names that `columns` gives them, as NAME=COLUMN.

    Raises `InvalidValue` for a row without a prompt, or without a column that a reward needs, unless it is skipped.
    """
    named = dict(given.split("=", 1) for given in columns)
    taken = {*named, *named.values()}
    for row in rows:
        found = {name: value for name, value in row.values.items() if name not in taken}
        found |= {name: row.values[column] for name, column in named.items() if column in row.values}
        if missing := sorted(name for name in {PROMPT, *needs} if found.get(name) is None):
            why = "a prompt and the columns that rewards need (other names: --columns)"
            reading.broken(InvalidValue.of(FIELD, f"{row.place} without {', '.join(missing)}", why))
            continue
        try:
            require_texts(found)
        except InvalidValue as error:
            reading.broken(InvalidValue.of(FIELD, row.place, f"a prompt: {error.message}"))
            continue
        yield row.place, found


def chat_of_prompt(row: Mapping[str, Any], place: str) -> Chat:
    """Return the conversation of a row up to the answer; raises `InvalidValue`."""
    messages = messages_in(row[PROMPT], PROMPT)
    if not messages or messages[-1].get("role") == ASSISTANT:
        raise InvalidValue.of(FIELD, place, "a prompt that does not end with an answer")
    return check_conversation(chat_of_row(row, messages))


def encoded_prompt(row: Mapping[str, Any], tokenizer: Tokenizer, place: str) -> tuple[int, ...]:
    """Return the token ids of a row's prompt: messages, or a text that a user says, formatted with the chat template up
    to the beginning of the answer; a text as it is if the tokenizer has no template. Raises `InvalidValue`."""
    given = row[PROMPT]
    if isinstance(given, str) and tokenizer.settings.chat_template is None:
        return tuple(tokenizer.encode(given))
    require_template(tokenizer)
    chat = chat_of_prompt(row, place)
    return tuple(tokenizer.encode_chat(chat.messages, chat.values))


def read_prompts(
    rows: Iterable[Row], columns: Sequence[str], tokenizer: Tokenizer, needs: Collection[str], reading: Reading
) -> Iterator[Prompt]:
    """Read and tokenize prompts; raises as `prompt_rows` and `encoded_prompt` do."""
    for place, row in prompt_rows(rows, columns, needs, reading):
        try:
            ids = encoded_prompt(row, tokenizer, place)
        except InvalidValue as error:
            reading.broken(error)
            continue
        yield Prompt(ids, row[PROMPT], place, {name: value for name, value in row.items() if name != PROMPT})
