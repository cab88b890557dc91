"""Tokenization of the rows of each kind of prepared data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer

from attn_train.data.conversations import read_chats, read_preferences, read_rows
from attn_train.data.preference_shapes import PREFERENCES
from attn_train.data.reading import Reading
from attn_train.data.rendering import TokenizedChat
from attn_train.data.shapes import CHATS, PAIRS, TEXTS, Shape
from attn_train.data.token_shards.inputs import Row
from attn_train.data.token_shards.shards import KINDS
from attn_train.tasks.seq2seq import token_pairs

SHAPES: Mapping[str, Sequence[Shape]] = {"text": TEXTS, "chat": CHATS, "preference": PREFERENCES, "pairs": PAIRS}
"""The shapes of the rows of each kind."""
Record = list[tuple[Sequence[int], Sequence[int] | None]]
"""The sequences of a record: token ids, and for each token whether it is a target (None: all are)."""


def affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after each document: BOS if the tokenizer adds it, and an end token, if any."""
    begin = tokenizer.bos_id
    begins = begin is not None and tokenizer.encode("a")[:1] == [begin]
    return [begin] if begins and begin is not None else [], [min(tokenizer.end_ids)] if tokenizer.end_ids else []


def encode_texts(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[Record]:
    """Tokenize each document that is not empty."""
    first, last = affixes(tokenizer)
    texts = [text for _, text in read_rows(rows, TEXTS, reading) if text]
    for ids in tokenizer.encode_texts(texts):
        yield [([*first, *ids, *last], None)]


def encode_chats(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[Record]:
    """Tokenize each conversation with the chat template; the targets are the assistant's answers."""
    for chat in read_chats(rows, tokenizer, reading):
        yield [ids_and_learned(chat)]


def encode_preferences(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[Record]:
    """Tokenize both conversations of each row, the chosen one first; raises `InvalidValue` for a labelled answer."""
    for pair in read_preferences(rows, tokenizer, reading):
        if len(pair.chats) < 2:
            raise InvalidValue.of("kind", "an answer with a label", "chosen and rejected answers for preference")
        yield [ids_and_learned(chat) for chat in pair.chats]


def encode_pairs(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[Record]:
    """Tokenize the source and target of each row; rows in which one is empty are left out, and counted."""
    pairs = [pair for _, pair in read_rows(rows, PAIRS, reading)]
    kept = [pair for pair in pairs if all(pair)]
    reading.note("left out with an empty side", len(pairs) - len(kept))
    for source, target in token_pairs(kept, tokenizer):
        yield [(source, None), (target, None)]


ENCODERS: Mapping[str, Callable[[Iterable[Row], Tokenizer, Reading], Iterator[Record]]] = {
    "text": encode_texts,
    "chat": encode_chats,
    "preference": encode_preferences,
    "pairs": encode_pairs,
}
if ENCODERS.keys() != KINDS.keys():
    raise RuntimeError("a kind of prepared data has no encoder, or an encoder has no kind")


def ids_and_learned(chat: TokenizedChat) -> tuple[list[int], list[int]]:
    """Return a conversation's token ids, and for each whether it is a target."""
    ids = [*chat.inputs, *chat.targets[-1:]] if chat.targets[-1] != IGNORED else list(chat.inputs)
    learned = [0, *(int(target != IGNORED) for target in chat.targets)]
    return ids, learned[: len(ids)]
