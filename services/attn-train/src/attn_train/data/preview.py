"""What files hold as training data: their shape and columns, and how the first rows are tokenized and learned."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import typer
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.prompts import TileTexts
from attn_schema import IMAGE_PLACE
from attn_schema.chat_form import THOUGHT
from attn_schema.prepared import ShowConfig

from attn_train.data.conversations import (
    PreferencePair,
    checked_chats,
    checked_preferences,
    read_chats,
    read_preferences,
    read_rows,
    rows_in,
)
from attn_train.data.messages import ASSISTANT
from attn_train.data.pictures import ALONE, IMAGE
from attn_train.data.preference_shapes import PREFERENCES
from attn_train.data.prompts import PROMPT, chat_of_prompt, encoded_prompt, prompt_rows
from attn_train.data.reading import Reading
from attn_train.data.rendering import WEIGHT
from attn_train.data.shapes import CHATS, MARKED, PAIRS, TEXTS, Chat, needed
from attn_train.data.token_rows import TokenRow
from attn_train.data.token_shards.encoders import ids_and_learned
from attn_train.data.token_shards.inputs import FIELD, Row, columns_of, input_files, require_utf8, split_files

EXAMPLES = 5
"""The number of examples that are shown."""
BEGINNING, END = 60, 100
"""The pieces that are shown of a long example."""
MANY = 8
"""More equal tokens in a row are shown as one, with their number."""
QUANTILES = {"min": 0.0, "median": 0.5, "95 %": 0.95, "max": 1.0}
"""The lengths that are shown."""
Pieces = list[tuple[str, bool]]
"""The tokens of a sequence as text, or without a tokenizer its messages, and for each whether it is learned."""


@dataclass(frozen=True)
class Preview:
    """The first rows of files: each has one sequence, or two with preferences."""

    format: str
    reading: Reading
    examples: Sequence[Sequence[Pieces]]
    tokenized: bool

    def facts(self, max_seq_len: int | None) -> dict[str, Any]:
        """Return shapes, columns, remarks and lengths, in tokens or, without a tokenizer, in characters."""
        every = [
            [(1 if self.tokenized else len(text), learned) for text, learned in pieces]
            for example in self.examples
            for pieces in example
        ]
        lengths = sorted(sum(size for size, _ in pieces) for pieces in every)
        learned = sum(size for pieces in every for size, learned in pieces if learned)
        found = {
            "format": self.format,
            "rows": self.reading.shapes.total(),
            "shapes": dict(self.reading.shapes),
            "columns": sorted(self.reading.used),
            "left_aside": sorted(self.reading.aside),
            "remarks": dict(self.reading.dropped),
            "first_broken": self.reading.first_broken,
            "unit": "tokens" if self.tokenized else "characters",
            "lengths": {name: lengths[int(part * (len(lengths) - 1))] for name, part in QUANTILES.items() if lengths},
            "learned": learned / max(1, sum(lengths)),
        }
        if max_seq_len and self.tokenized:
            # The last token of a sequence is no input, but that of a prompt.
            found["too_long"] = sum(length > max_seq_len + (self.format != PROMPT) for length in lengths)
        return found


def preview(path: str, config: ShowConfig, tokenizer: Tokenizer | None, tiles: TileTexts | str = ALONE) -> Preview:
    """Read the first `config.rows` examples of a file, or of a folder's training files, in the given format or in that
    of the columns; `tiles` is what encodes images for the tokenizer's model.

    Raises `InvalidValue` as training on them does.
    """
    reading = Reading(skip_broken=config.skip_broken) if config.format == PROMPT else Reading.of(config, tiles)
    files = split_files(Path(path), input_files([path]))["train"]
    for file in files:
        require_utf8(file, FIELD, skip_broken=config.skip_broken)
    known = format_of(columns_of(files[0]), reading) if config.format == "auto" else config.format
    rows = rows_in(files, reading)
    if known == PROMPT:
        found = _prompts(rows, config.columns, tokenizer, reading)
    else:
        found = _examples(known, rows, tokenizer, reading)
    examples = islice(found, config.rows)
    return Preview(known, reading, list(examples), tokenizer is not None)


def format_of(columns: Sequence[str] | None, reading: Reading) -> str:
    """Return the format of files with these columns, None for text; raises `InvalidValue` for columns of no shape."""
    if columns is None:
        return "text"
    own = tuple(shape for shape in CHATS if shape is not MARKED)
    for known, shapes in {"preference": PREFERENCES, "chat": own, "pairs": PAIRS, "text": TEXTS}.items():
        with suppress(InvalidValue):
            reading.needed_of(columns, shapes)
            return known
    if PROMPT in reading.renamed(dict.fromkeys(columns)):
        return PROMPT
    reading.needed_of(columns, (*CHATS, *PREFERENCES, *PAIRS, *TEXTS))
    raise InvalidValue.of("columns", ", ".join(columns), needed(CHATS))


def _examples(known: str, rows: Iterable[Row], tokenizer: Tokenizer | None, reading: Reading) -> Iterator[list[Pieces]]:
    if known in ("text", "pairs"):
        for _, found in read_rows(rows, {"text": TEXTS, "pairs": PAIRS}[known], reading):
            texts = [found] if isinstance(found, str) else found
            yield [
                [(text, True)] if tokenizer is None else _tokens(tokenizer, tokenizer.encode(text)) for text in texts
            ]
    elif tokenizer is None:
        for _, checked in (checked_chats if known == "chat" else checked_preferences)(rows, reading):
            chats = checked if isinstance(checked, tuple) else [checked]
            yield [_messages(chat) for chat in chats if chat is not None]
    else:
        for example in (read_chats if known == "chat" else read_preferences)(rows, tokenizer, reading):
            tokenized = example.chats if isinstance(example, PreferencePair) else [example]
            yield [_tokens(tokenizer, *ids_and_learned(chat)) for chat in tokenized]


def _prompts(
    rows: Iterable[Row], columns: Sequence[str], tokenizer: Tokenizer | None, reading: Reading
) -> Iterator[list[Pieces]]:
    """Yield prompts, of which nothing is learned; rewards may need all columns of a row."""
    for place, row in prompt_rows(rows, columns, (), reading):
        try:
            if tokenizer is None:
                pieces = _messages(chat_of_prompt(row, place))
            else:
                ids = encoded_prompt(row, tokenizer, place)
                pieces = _tokens(tokenizer, ids, [0] * len(ids))
        except InvalidValue as error:
            reading.broken(error)
            continue
        reading.shapes[PROMPT] += 1
        reading.used |= row.keys()
        reading.seen("with a prompt that others have, too", tuple(pieces))
        yield [pieces]


def _tokens(tokenizer: Tokenizer, ids: Sequence[int], learned: Sequence[int] | None = None) -> Pieces:
    flags = [True] * len(ids) if learned is None else map(bool, learned)
    return [(tokenizer.decode([token], skip_special=False), flag) for token, flag in zip(ids, flags, strict=True)]


def _messages(row: Chat | Sequence[TokenRow]) -> Pieces:
    if not isinstance(row, Chat):
        return [(f"{token} ", learned) for one in row for token, learned in zip(one.ids, one.learned, strict=True)]
    pieces: Pieces = [(f"{name}: {json.dumps(value)}\n", False) for name, value in row.values.items()]
    names = iter(f"{len(one)} bytes" if isinstance(one, bytes) else one.name for one in row.images)
    for message in row.messages:
        learned = message["role"] == ASSISTANT and bool(message.get(WEIGHT, 1))
        pieces.append((f"{message['role']}: ", False))
        for key in (THOUGHT, "content", "tool_calls"):
            if value := message.get(key):
                text = value if isinstance(value, str) else json.dumps(value)
                first, *others = text.split(IMAGE_PLACE) if row.images else [text]
                shown = (f"{IMAGE[:-1]} {next(names)}>{other}" for other in others)
                pieces.append((first + "".join(shown), learned))
        pieces.append(("\n", False))
    return pieces


def shown(pieces: Pieces, *, tokenized: bool) -> str:
    """Return a sequence for a terminal: tokens apart, and what is learned in green, without colour in brackets; of
    equal tokens in a row, as those of an image, one with their number."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text, before = "", False
    runs = [list(same) for _, same in groupby(pieces)]
    joined = [[(f"{run[0][0]}×{len(run)}", run[0][1])] if tokenized and len(run) > MANY else run for run in runs]
    pieces = [piece for run in joined for piece in run]
    cut = len(pieces) > BEGINNING + END
    for place, (piece, learned) in enumerate(pieces):
        if cut and BEGINNING <= place < len(pieces) - END:
            text += " ... " * (place == BEGINNING)
            continue
        text += "" if colour or learned == before else "[" if learned else "]"
        text += "|" * bool(tokenized and place and learned == before)
        text += typer.style(piece, fg="green") if colour and learned else piece
        before = learned
    return text + "]" * (before and not colour)
