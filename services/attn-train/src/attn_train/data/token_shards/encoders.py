"""Tokenization of the rows of each kind of prepared data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer

from attn_train.data.conversations import (
    CHOSEN,
    MESSAGES,
    PROMPT,
    REJECTED,
    TokenizedChat,
    check_conversation,
    require_template,
    tokenized_chats,
)
from attn_train.data.token_shards.inputs import Row
from attn_train.data.token_shards.shards import KINDS
from attn_train.tasks.seq2seq import token_pairs

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "chat": (MESSAGES,),
    "preference": (PROMPT, CHOSEN, REJECTED),
    "pairs": ("source", "target"),
}
"""The default columns of the rows of each kind."""
Record = list[tuple[Sequence[int], Sequence[int] | None]]
"""The sequences of a record: token ids, and for each token whether it is a target (None: all are)."""


def affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after each document: BOS if the tokenizer adds it, and an end token, if any."""
    begin = tokenizer.bos_id
    begins = begin is not None and tokenizer.encode("a")[:1] == [begin]
    return [begin] if begins and begin is not None else [], [min(tokenizer.end_ids)] if tokenizer.end_ids else []


class TextEncoder:
    """Encodes documents, each in a column `text`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first, self._last = affixes(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """Tokenize each document that is not empty."""
        texts = [text for row in rows if (text := text_in(row, "text"))]
        found = self._tokenizer.encode_texts(texts)
        return [[([*self._first, *ids, *self._last], None)] for ids in found]


class ChatEncoder:
    """Encodes conversations with the chat template of the tokenizer; the targets are the assistant's answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        require_template(tokenizer)
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """Tokenize each conversation."""
        chats = (tokenized_chats(self._tokenizer, _messages(row, MESSAGES), row.place) for row in rows)
        return [[ids_and_learned(chat)] for answers in chats for chat in answers]


class PreferenceEncoder(ChatEncoder):
    """Encodes each conversation twice: with the chosen answer, and with the rejected one."""

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """Tokenize both conversations of each row."""
        records: list[Record] = []
        for row in rows:
            prompt = _messages(row, PROMPT)
            both = (prompt + _messages(row, name) for name in (CHOSEN, REJECTED))
            records.append(
                [ids_and_learned(tokenized_chats(self._tokenizer, messages, row.place)[-1]) for messages in both]
            )
        return records


class PairEncoder:
    """Encodes pairs of source and target for encoder-decoders."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """Tokenize the source and target of each row; rows in which one is empty are left out."""
        pairs = [(text_in(row, "source"), text_in(row, "target")) for row in rows]
        found = token_pairs([pair for pair in pairs if all(pair)], self._tokenizer)
        return [[(source, None), (target, None)] for source, target in found]


ENCODERS: Mapping[str, Callable[[Tokenizer], Callable[[Sequence[Row]], list[Record]]]] = {
    "text": TextEncoder,
    "chat": ChatEncoder,
    "preference": PreferenceEncoder,
    "pairs": PairEncoder,
}
if ENCODERS.keys() != KINDS.keys():
    raise RuntimeError("a kind of prepared data has no encoder, or an encoder has no kind")


def ids_and_learned(chat: TokenizedChat) -> tuple[list[int], list[int]]:
    """Return a conversation's token ids, and for each whether it is a target."""
    ids = [*chat.inputs, *chat.targets[-1:]] if chat.targets[-1] != IGNORED else list(chat.inputs)
    learned = [0, *(int(target != IGNORED) for target in chat.targets)]
    return ids, learned[: len(ids)]


def text_in(row: Row, name: str) -> str:
    """Return the string in a column; raises `InvalidValue` for other values."""
    value = row.values.get(name)
    if not isinstance(value, str):
        found = "nothing" if value is None else type(value).__name__
        raise InvalidValue.of("columns", f"{name!r} of {row.place}, which is {found}", "a string in every row")
    return value


def _messages(row: Row, name: str) -> list[dict[str, Any]]:
    value = row.values.get(name)
    if not isinstance(value, list):
        raise InvalidValue.of("columns", f"{name!r} of {row.place}", "a list of messages in every row")
    try:
        return check_conversation(value)
    except InvalidValue as error:
        raise InvalidValue.of(
            "columns", f"{name!r} of {row.place}", f"messages with a role and a content: {error.message}"
        ) from error
