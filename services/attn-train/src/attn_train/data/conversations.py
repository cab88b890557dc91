"""Conversation data: rows of messages, or of prompts with preferred and rejected answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import check_messages
from attn_models.vision_language.prompts import TileTexts
from attn_schema.chat_form import THOUGHT
from attn_schema.training import DataConfig

from attn_train.checking import require_wanted
from attn_train.data.messages import ASSISTANT, IMAGES, json_in
from attn_train.data.pictures import ALONE
from attn_train.data.preference_shapes import PREFERENCES, Judged
from attn_train.data.reading import Reading
from attn_train.data.rendering import FIELD, WEIGHT, TokenizedChat, require_template, tokenized_chats
from attn_train.data.shapes import CHATS, Chat, Shape
from attn_train.data.token_rows import TokenRow
from attn_train.data.token_shards.inputs import Row, input_files, rows_of, split_files, units_of, unread
from attn_train.tasks.base import split_validation

Example = TypeVar("Example")
WHOLE = 1 << 62
"""More bytes than a file has, so that it is one unit."""
KEYS = frozenset({"role", "content", "name", WEIGHT, THOUGHT, "tool_calls", "tool_call_id"})
"""What is read of a message."""
MEANT = re.compile(
    "weight|loss|train|mask|prefix|call|tool|function|think|reason|thought|content|image|audio|video|part",
    re.IGNORECASE,
)
"""What is in the names of keys that would change what is said or learned; others only describe a message."""


@dataclass(frozen=True, eq=False)
class PreferencePair:
    """Two conversations that differ in their answers, `chosen` the preferred one; or one alone, if it is labelled."""

    chosen: TokenizedChat | None
    rejected: TokenizedChat | None

    @property
    def chats(self) -> list[TokenizedChat]:
        """The conversations."""
        return [chat for chat in (self.chosen, self.rejected) if chat is not None]


def rows_in(files: Sequence[Path], reading: Reading) -> Iterator[Row]:
    """Yield the rows of files; those that cannot be read are refused or counted by `reading`."""
    for file in files:
        reading.folder = file.parent
        for unit in units_of(file, "", WHOLE):
            yield from rows_of(unit, lines=True, broken=reading.broken)


def read_rows(rows: Iterable[Row], shapes: Sequence[Shape], reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yield the place of each row, and what its shape reads of it.

    Raises `InvalidValue`, with the place, for rows of no shape, unless they are skipped, and as `require_wanted` does.
    """
    for row in rows:
        require_wanted()
        try:
            found = reading.read(row.values, shapes)
        except InvalidValue as error:
            reading.broken(InvalidValue.of(FIELD, row.place, f"a row of a known shape: {error.message}"))
            continue
        yield row.place, found


def found_in(shapes: Sequence[Shape]) -> Callable[[Iterable[Row], Reading], Iterator[Any]]:
    """Return a function for `read_splits` that reads rows by shapes."""
    return lambda rows, reading: (found for _, found in read_rows(rows, shapes, reading))


def checked_chats(rows: Iterable[Row], reading: Reading) -> Iterator[tuple[str, Chat | list[TokenRow]]]:
    """Yield the place of each conversation and its messages, or the tokens of those of a row; raises as `read_rows` and
    `check_conversation` do."""
    for place, found in read_rows(rows, CHATS, reading):
        for checked in _checked([found], place, reading):
            chat = checked[0]
            if isinstance(chat, Chat):
                if not _answers(chat, place, reading):
                    continue
                empty = any(one["role"] == ASSISTANT and is_empty(one) for one in chat.messages)
                reading.note("with an empty answer", int(empty))
                reading.note("with images", int(bool(chat.images)))
            yield place, chat


def checked_preferences(rows: Iterable[Row], reading: Reading) -> Iterator[tuple[str, Judged]]:
    """Yield the place and both conversations of each row, None for one that a labelled row lacks; rows in which nothing
    is preferred are left out, and counted. Raises as `checked_chats` does."""
    for place, both in read_rows(rows, PREFERENCES, reading):
        for chosen, rejected in _checked(both, place, reading):
            if prefers(chosen, rejected, reading) and all(_answers(one, place, reading) for one in (chosen, rejected)):
                reading.note("with images", int(any(one.images for one in (chosen, rejected) if one is not None)))
                yield place, (chosen, rejected)


def is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing."""
    return not ((message.get("content") or "").strip() or message.get("tool_calls"))


def prefers(chosen: Chat | None, rejected: Chat | None, reading: Reading) -> bool:
    """Whether one of two conversations can be preferred; counts those where not, and prompts that come again."""
    given = [one.messages for one in (chosen, rejected) if one is not None]
    if not given:
        reading.note("left out, as neither answer is preferred", 1)
        return False
    if len(given) == 2 and given[0] == given[1]:
        reading.note("left out, as both answers are equal", 1)
        return False
    if any(is_empty(one[-1]) for one in given):
        reading.note("left out, as an answer is empty", 1)
        return False
    asked = json.dumps([one for one in given[0] if one in given[-1]])
    images = next(one.images for one in (chosen, rejected) if one is not None)
    reading.seen("with a prompt that others have, too", (asked, images))
    return True


def _checked(conversations: Sequence[Any], place: str, reading: Reading) -> list[list[Any]]:
    """Return a list of the checked conversations of a row; an empty one if the row is skipped."""
    try:
        checked = [check_conversation(one) if isinstance(one, Chat) else one for one in conversations]
    except InvalidValue as error:
        reading.broken(InvalidValue.of(FIELD, place, f"messages with a role and a content: {error.message}"))
        return []
    chats = (one for one in conversations if isinstance(one, Chat))
    reading.aside |= {f"messages.{key}" for one in chats for message in one.messages for key in message.keys() - KEYS}
    return [checked]


def _answers(chat: Chat | None, place: str, reading: Reading) -> bool:
    """Whether a conversation has an answer to learn; one without is refused, unless such rows are skipped."""
    if chat is None or any(one["role"] == ASSISTANT and one.get(WEIGHT, 1) for one in chat.messages):
        return True
    roles = ", ".join(dict.fromkeys(one["role"] for one in chat.messages))
    allowed = f"a message with the role {ASSISTANT} whose weight is not 0; its roles: {roles}"
    reading.broken(InvalidValue.of(FIELD, place, allowed))
    return False


def check_conversation(chat: Chat) -> Chat:
    """Return a conversation with messages of the `KEYS`; the weight of an answer is left out where it is 1.

    Raises `InvalidValue` for other weights, for other keys that are `MEANT`, for calls that are none, and for what
    `check_messages` refuses.
    """
    for place, message in enumerate(chat.messages):
        for key in filter(MEANT.search, sorted(message.keys() - KEYS)):
            allowed = f"none: {ALONE}" if key == IMAGES else f"only {', '.join(sorted(KEYS))}"
            raise InvalidValue.of(f"messages[{place}].{key}", message[key], allowed)
        weight, field = message.get(WEIGHT), f"messages[{place}].{WEIGHT}"
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise InvalidValue.of(field, weight, "0 or 1")
        if weight and message.get("role") != ASSISTANT:
            raise InvalidValue.of(field, weight, f"none for the role {message.get('role')}: only answers are learned")
        _check_calls(message, f"messages[{place}]")
    plain = check_messages([{key: one[key] for key in one if key in KEYS - {WEIGHT}} for one in chat.messages])
    unlearned = [{WEIGHT: 0} if one.get(WEIGHT) == 0 and one["role"] == ASSISTANT else {} for one in chat.messages]
    return replace(chat, messages=[one | also for one, also in zip(plain, unlearned, strict=True)])


def _check_calls(message: Mapping[str, Any], place: str) -> None:
    for name in (THOUGHT, "name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise InvalidValue.of(f"{place}.{name}", message[name], "a text")
    calls = message.get("tool_calls", [])
    if calls and message.get("role") != ASSISTANT:
        raise InvalidValue.of(f"{place}.tool_calls", calls, f"none for the role {message.get('role')}")
    if not isinstance(calls, list):
        raise InvalidValue.of(f"{place}.tool_calls", calls, "a list of calls")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidValue.of(f"{place}.tool_calls[{number}]", call, "a function with a name and arguments")
        if not isinstance(json_in(arguments or {}, f"{place}.tool_calls[{number}].function.arguments"), Mapping):
            raise InvalidValue.of(f"{place}.tool_calls[{number}].function.arguments", arguments, "a JSON object")


def read_splits(
    data: DataConfig, read: Callable[[Iterable[Row], Reading], Iterable[Example]], tiles: TileTexts | str = ALONE
) -> tuple[list[Example], list[Example], str]:
    """Return the training and validation examples of a config, and what was left out, as text; `tiles` is what encodes
    images.

    The examples for validation are those of files that are named so beside the training files, else the fraction at the
    end.
    """
    path, reading = Path(data.path or ""), Reading.of(data, tiles)
    files = input_files([str(path)])
    splits = split_files(path, files)
    training, kept = (list(read(rows_in(splits[name], reading), reading)) for name in ("train", "validation"))
    if not splits["validation"]:
        training, kept = map(list, split_validation(training, data.validation_fraction))
    return training, kept, f"{reading}{unread(path, [*splits['train'], *splits['validation'], *reading.pictures])}"


def token_row_chat(row: TokenRow, tokenizer: Tokenizer, place: str) -> TokenizedChat:
    """Return ready-made token ids as a conversation; raises `InvalidValue` for ids that are not in the vocabulary."""
    wrong = [token for token in row.ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise InvalidValue.of(FIELD, f"{place}: the token {wrong[0]}", f"0 to {tokenizer.vocab_size - 1}")
    pairs = zip(row.ids[1:], row.learned[1:], strict=True)
    return TokenizedChat(row.ids[:-1], tuple(token if learned else IGNORED for token, learned in pairs))


def chats_of(row: Chat | list[TokenRow], tokenizer: Tokenizer, place: str, reading: Reading) -> list[TokenizedChat]:
    """Tokenize the conversations of a row; those in which no token is learned are left out, and counted in `reading`.

    Raises as `tokenized_chats` does, unless rows that cannot be read are skipped.
    """
    try:
        if isinstance(row, Chat):
            found = tokenized_chats(tokenizer, row, place, reading.tiles)
        else:
            found = [token_row_chat(one, tokenizer, place) for one in row]
    except InvalidValue as error:
        reading.broken(error)
        return []
    kept = [chat for chat in found if chat.answered]
    reading.note("left out, as no token of them is learned", len(found) - len(kept))
    if tokenizer.end_ids:
        endless = sum(tokenizer.end_ids.isdisjoint(chat.targets) for chat in kept)
        reading.note("in which no learned token ends an answer", endless)
    return kept


def read_chats(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[TokenizedChat]:
    """Read and tokenize conversations; raises as `checked_chats` and `chats_of` do."""
    for place, row in checked_chats(rows, reading):
        if isinstance(row, Chat):
            require_template(tokenizer)
        for chat in chats_of(row, tokenizer, place, reading):
            reading.seen("that others equal", (chat.inputs, chat.targets, chat.images and chat.images.pictures))
            yield chat


def pair_of(both: Judged, tokenizer: Tokenizer, place: str, reading: Reading) -> PreferencePair | None:
    """Tokenize both conversations of a row; None if it is skipped. Raises as `tokenized_chats` does."""
    try:
        made = (None if chat is None else tokenized_chats(tokenizer, chat, place, reading.tiles)[-1] for chat in both)
        chosen, rejected = made
    except InvalidValue as error:
        reading.broken(error)
        return None
    return PreferencePair(chosen, rejected)


def read_preferences(rows: Iterable[Row], tokenizer: Tokenizer, reading: Reading) -> Iterator[PreferencePair]:
    """Read and tokenize preferences; raises as `checked_preferences` and `tokenized_chats` do."""
    require_template(tokenizer)
    for place, both in checked_preferences(rows, reading):
        if (pair := pair_of(both, tokenizer, place, reading)) is not None:
            yield pair
