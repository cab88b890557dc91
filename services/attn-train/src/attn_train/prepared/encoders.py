"""Tokens of the rows of each kind of prepared data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import check_messages

from attn_train.data.conversations import (
    CHOSEN,
    MESSAGES,
    PROMPT,
    REJECTED,
    TokenizedChat,
    require_template,
    tokenized_chat,
)
from attn_train.prepared.inputs import Row
from attn_train.prepared.shards import KINDS
from attn_train.tasks.seq2seq import token_pairs

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "chat": (MESSAGES,),
    "preference": (PROMPT, CHOSEN, REJECTED),
    "pairs": ("source", "target"),
}
"""What is read of the rows of each kind, unless other columns are named."""
Record = list[tuple[Sequence[int], Sequence[int] | None]]
"""The sequences of a record: token ids, and whether each is learned."""


def affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that begin a document, where texts of the tokenizer begin with one, and those that end it."""
    begin = tokenizer.bos_id
    begins = begin is not None and tokenizer.encode("a")[:1] == [begin]
    return [begin] if begins and begin is not None else [], [min(tokenizer.end_ids)] if tokenizer.end_ids else []


class TextEncoder:
    """Documents, each in a column `text`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first, self._last = affixes(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """The tokens of each that is not empty."""
        texts = [text for row in rows if (text := text_in(row, "text"))]
        found = self._tokenizer.encode_batch(texts, add_special=False)
        return [[([*self._first, *ids, *self._last], None)] for ids in found]


class ChatEncoder:
    """Conversations in the chat template of the tokenizer; answers are learned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        require_template(tokenizer)
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """The tokens of each."""
        chats = (tokenized_chat(self._tokenizer, _messages(row, MESSAGES), row.place) for row in rows)
        return [[_learned(chat)] for chat in chats]


class PreferenceEncoder(ChatEncoder):
    """A conversation with the preferred answer, and with the rejected one."""

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """The tokens of both."""
        records: list[Record] = []
        for row in rows:
            asked = _messages(row, PROMPT)
            both = (asked + _messages(row, name) for name in (CHOSEN, REJECTED))
            records.append([_learned(tokenized_chat(self._tokenizer, messages, row.place)) for messages in both])
        return records


class PairEncoder:
    """Sources and targets, as encoder-decoders read them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Row]) -> list[Record]:
        """The tokens of both."""
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
    raise RuntimeError("every kind of prepared data has an encoder")


def _learned(chat: TokenizedChat) -> tuple[list[int], list[int]]:
    """A conversation's tokens and whether each is to be predicted."""
    ids = [*chat.inputs, *chat.targets[-1:]] if chat.targets[-1] != IGNORED else list(chat.inputs)
    learned = [0, *(int(target != IGNORED) for target in chat.targets)]
    return ids, learned[: len(ids)]


def text_in(row: Row, name: str) -> str:
    """The string in a column; raises `InvalidValue` for anything else."""
    value = row.values.get(name)
    if not isinstance(value, str):
        found = "nothing" if value is None else type(value).__name__
        raise InvalidValue.of("columns", f"{name!r} of {row.place}, which is {found}", "a string in every row")
    return value


def _messages(row: Row, name: str) -> list[dict[str, str]]:
    value = row.values.get(name)
    if not isinstance(value, list):
        raise InvalidValue.of("columns", f"{name!r} of {row.place}", "a list of messages in every row")
    try:
        return check_messages(value)
    except (InvalidValue, AttributeError) as error:
        raise InvalidValue.of(
            "columns", f"{name!r} of {row.place}", f"messages with a role and a content: {error}"
        ) from error
