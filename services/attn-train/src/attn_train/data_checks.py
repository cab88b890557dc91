"""Validation of the data of a job before it is accepted."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue, UnknownName
from attn_models.tokenizers import Tokenizer
from attn_schema.text_files import files_of, read_lines, require_utf8
from attn_schema.training import DataConfig, TrainingConfig

from attn_train.checking import require_wanted
from attn_train.data.conversations import checked_chats, checked_preferences, rows_in
from attn_train.data.images import known_images, picture_files
from attn_train.data.labels import INCLUDED as LABELLED
from attn_train.data.labels import label_files
from attn_train.data.load import (
    PAIRS,
    TEXT,
    data_kind_of,
    default_tokenizer,
    require_known_text,
    tiles_of,
    tokenizer_folder,
)
from attn_train.data.pairs import known_pair_sets, pair_paths
from attn_train.data.pictures import require_seen
from attn_train.data.prompts import PROMPT, encoded_prompt, prompt_rows
from attn_train.data.reading import Reading
from attn_train.data.rendering import require_template
from attn_train.data.shapes import Chat
from attn_train.data.synthetic import TASKS
from attn_train.data.token_shards import inputs
from attn_train.data.token_shards.inputs import has_rows, input_files, split_files
from attn_train.data.token_shards.shards import FIELD as PREPARED
from attn_train.data.treebank import treebank_files
from attn_train.rewards import Rewards
from attn_train.tasks.language_modeling import CHARACTER
from attn_train.tasks.on_policy import require_room
from attn_train.tasks.packed import open_prepared
from attn_train.tasks.prepared_records import open_records
from attn_train.tasks.seq2seq import WORD, is_byte_pairs, is_learned_tokenizer

MAX_BYTES = 4 << 30
"""Maximum size of a text, which is held in memory."""


def check_text(data: DataConfig, *, home: Path) -> None:
    """Raise an error for the first problem that would keep the text from being read."""
    if data.name is not None:
        require_known_text(data.name)
        if data.name in TASKS:
            if data.tokenizer not in {CHARACTER, WORD}:
                raise InvalidValue.of(
                    "config.data.tokenizer", data.tokenizer, "none, or 'word': synthetic tasks consist of words"
                )
            return
    else:
        path = Path(data.path or "")
        check_path(path)
        if has_rows(path):
            check_encoding(data)
        else:
            splits = split_files(path, files_of(path))
            for file in splits["train"] + splits["validation"]:
                require_wanted()
                with file.open("rb") as text:
                    require_utf8(text.read, file, FIELD)
    if is_byte_pairs(data.tokenizer):
        check_learned(data.tokenizer)
    elif data.tokenizer != CHARACTER:
        folder = Path(tokenizer_folder(data.tokenizer, home))
        if not (folder / "tokenizer.json").is_file():
            allowed = "'character', 'byte_pairs:N', a model on this server, or a folder with a tokenizer.json"
            raise InvalidValue.of("config.data.tokenizer", data.tokenizer, allowed)


def check_prepared(config: TrainingConfig) -> None:
    """Raise an error for the first problem with folders of prepared data, or for too few epochs for the steps."""
    if data_kind_of(config.model) not in (TEXT, PAIRS):
        allowed = "none: only decoders and encoder-decoders can train on prepared data"
        raise InvalidValue.of(PREPARED, config.data.prepared, allowed)
    for source in config.data.sources:
        if not Path(source.path).is_absolute():
            raise InvalidValue.of(PREPARED, source.path, "an absolute path on the server")
    if config.data.format == "preference" or config.model.is_encoder_decoder:
        open_records(config)
        return
    task = open_prepared(config.data.sources).task(config)
    rows = config.optimizer.steps * config.optimizer.batch_size * config.optimizer.gradient_accumulation_steps
    if rows > task.max_rows:
        given = f"{config.data.prepared} with at most {task.max_rows:g} sequences of {config.model.sequence_length}"
        raise InvalidValue.of(
            PREPARED,
            given,
            f"at least {rows} sequences, which all steps need: allow more epochs, or train for fewer steps",
        )


def check_conversations(config: TrainingConfig, home: Path) -> None:
    """Raise `InvalidValue` for the first row that is not a conversation, or a prompt with what its rewards need, unless
    such rows are skipped, and `UserError` for messages without a chat template."""
    data = config.data
    if data.path is None:
        raise InvalidValue.of(
            FIELD, data.dataset, f"the path of a file or folder, which the format {data.format} needs"
        )
    tokenizer = Tokenizer.from_folder(tokenizer_folder(data.tokenizer, home))
    if data.format == "prompt" or config.on_policy.lmbda is not None:
        require_room(config)
    if data.format == "prompt":
        check_encoding(data)
        needs, reading = Rewards(config.on_policy).needs, Reading(skip_broken=data.skip_broken)
        for place, row in prompt_rows(rows_in(input_files([data.path]), reading), data.columns, needs, reading):
            require_wanted()
            if not isinstance(row[PROMPT], str):
                encoded_prompt(row, tokenizer, place)
                break
        return
    checked = checked_chats if data.format == "chat" else checked_preferences
    reading = Reading.of(data, tiles_of(config, tokenizer, home))
    found: Any = None
    for place, found in checked(rows_in(input_files([data.path]), reading), reading):
        chats = [one for one in (found if isinstance(found, tuple) else [found]) if isinstance(one, Chat)]
        for chat in chats:
            require_template(tokenizer)
            require_seen(chat, reading.tiles, place)
    if found is None:
        raise InvalidValue.of(
            FIELD, f"{data.path} with none{reading}", f"at least one row for the format {data.format}"
        )


def check_masked(data: DataConfig, *, home: Path) -> None:
    """Like `check_text`, but synthetic tasks are not allowed: their words cannot be predicted from their neighbours."""
    if data.name in TASKS:
        raise InvalidValue.of("config.data.dataset", data.name, "a text, not a synthetic task")
    check_text(data, home=home)


def check_learned(tokenizer: str) -> None:
    """Raise `InvalidValue` for an invalid vocabulary size of a learned tokenizer."""
    size = tokenizer.partition(":")[2]
    if size and not (size.isascii() and size.isdecimal() and len(size) <= 7):
        raise InvalidValue.of("config.data.tokenizer", tokenizer, "'word', 'byte_pairs' or 'byte_pairs:N'")


def check_path(path: Path) -> None:
    """Raise `InvalidValue` for a path that is relative, cannot be read, is empty or is too large."""
    field = "config.data.dataset"
    if not path.is_absolute():
        raise InvalidValue.of(field, str(path), "an absolute path on the server")
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    if not files or not all(file.is_file() and os.access(file, os.R_OK) for file in files):
        raise InvalidValue.of(field, str(path), "a text file, or a folder of text files, that the server can read")
    size = sum(file.stat().st_size for file in files)
    if not 0 < size <= MAX_BYTES:
        raise InvalidValue.of(field, f"{path} with {size} bytes", f"text of 1 to {MAX_BYTES} bytes")


def check_encoding(data: DataConfig) -> None:
    """Raise `InvalidValue`, with the line and the byte, for a file of rows that is not UTF-8."""
    path = Path(data.path or "")
    splits = split_files(path, input_files([str(path)]))
    for file in splits["train"] + splits["validation"]:
        require_wanted()
        inputs.require_utf8(file, FIELD, skip_broken=data.skip_broken)


def check_lines(path: Path, most: int | None = None) -> None:
    """Raise `InvalidValue` for a path that `check_path` refuses, or if the first `most` lines cannot be read."""
    check_path(path)
    for _ in islice(read_lines(path, FIELD), most):
        require_wanted()


def check_pairs(data: DataConfig, *, home: Path) -> None:
    """Raise an error for the first problem that would keep the pairs from being read."""
    if data.name is not None:
        if data.name not in known_pair_sets():
            raise UnknownName.of("set of pairs", data.name, known_pair_sets())
    else:
        path = Path(data.path or "")
        check_path(path)
        if has_rows(path, headed=bool(data.columns)):
            check_encoding(data)
        else:
            for file in pair_paths(path, data.languages):
                check_lines(file, data.max_pairs or None)
    check_tokenizer(data, home)


def check_tokenizer(data: DataConfig, home: Path) -> None:
    """Raise `InvalidValue` for a tokenizer of pairs or sentences that is neither a learned one nor exists."""
    tokenizer = default_tokenizer(data)
    if is_learned_tokenizer(tokenizer):
        check_learned(tokenizer)
    elif not (Path(tokenizer_folder(tokenizer, home)) / "tokenizer.json").is_file():
        allowed = "'word', 'byte_pairs', 'byte_pairs:N', a model on this server, or a folder with a tokenizer.json"
        raise InvalidValue.of("config.data.tokenizer", tokenizer, allowed)


def check_tags(data: DataConfig, *, home: Path) -> None:
    """Raise an error for the first problem that would keep the sentences from being read."""
    if data.name is not None:
        raise InvalidValue.of(
            "config.data.dataset", data.name, "the path of a .conllu file or of a folder with such files"
        )
    path = Path(data.path or "")
    check_path(path)
    for files in treebank_files(path):
        for file in files:
            check_lines(file)
    check_tokenizer(data, home)


def check_labels(data: DataConfig, *, home: Path) -> None:
    """Raise an error for the first problem that would keep the labelled texts from being read."""
    if data.name is not None and data.name not in LABELLED:
        raise UnknownName.of("set of labelled texts", data.name, list(LABELLED))
    if data.path is not None:
        path = Path(data.path)
        check_path(path)
        if has_rows(path, headed=bool(data.columns)):
            check_encoding(data)
        else:
            for file in [file for files in label_files(path) for file in files]:
                check_lines(file)
    check_tokenizer(data, home)


FIELD = "config.data.dataset"


def check_images(data: DataConfig, *, home: Path) -> None:
    """Raise an error for the first problem that would keep the images from being found."""
    del home
    if data.tokenizer != CHARACTER:
        raise InvalidValue.of("config.data.tokenizer", data.tokenizer, "none: images are not tokenized")
    if data.name is not None:
        if data.name not in known_images():
            raise UnknownName.of("set of images", data.name, known_images())
        return
    path = Path(data.path or "")
    if not path.is_absolute():
        raise InvalidValue.of(FIELD, str(path), "an absolute path on the server")
    if path.is_dir():
        picture_files(path)
    else:
        check_path(path)
