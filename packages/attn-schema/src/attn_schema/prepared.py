"""Prepared training data: the options of `attn data prepare`, and the text form of weighted mixtures of folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal

from attn_core.errors import InvalidValue

from attn_schema.schema import MAX_INT32, TOKENIZER, Checked, in_panel

_rows = in_panel("Rows")

FORM = "FOLDER[:WEIGHT[:EPOCHS]],..., such as web:0.7,books:0.3:2"


COLUMNS_HELP = "Columns that have other names, as NAME=COLUMN, such as prompt=question,completion=answer."
BROKEN_HELP = "Leave out rows that cannot be read, and count them."


class PrepareConfig(Checked, frozen=True, kw_only=True):
    """The options of `attn data prepare`, which turns files into tokenised training data."""

    tokenizer: Annotated[
        str,
        _rows(
            "A model on this machine, a folder with a tokenizer.json, or byte_pairs:N (trained on the data).",
            names=TOKENIZER,
        ),
    ] = ""
    kind: Annotated[
        Literal["text", "chat", "preference", "pairs"],
        _rows("Kind of the rows, whose published shapes are recognised by their columns."),
    ] = "text"
    columns: Annotated[tuple[str, ...], _rows(COLUMNS_HELP)] = ()
    skip_broken: Annotated[bool, _rows(BROKEN_HELP)] = False
    documents: Annotated[
        Literal["file", "line"], _rows("Unit of a document in text: the whole file, or each line.")
    ] = "file"
    validation: Annotated[
        tuple[str, ...], _rows("Files held out for validation: FILES, or NAME=FILES for a separate validation set.")
    ] = ()
    validation_fraction: Annotated[
        float, _rows("Fraction of rows, or of texts at their end, that is held out for validation.", ge=0, lt=1)
    ] = 0.0
    seed: Annotated[int, _rows("Seed by which rows are chosen for validation.", ge=0, le=2**64 - 1)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_named_columns(self.columns)


class ShowConfig(Checked, frozen=True, kw_only=True):
    """The options of `attn data show` for files of rows or text."""

    tokenizer: Annotated[
        str, _rows("A model on this machine, or a folder with a tokenizer.json; without, messages are shown.")
    ] = ""
    format: Annotated[
        Literal["auto", "text", "chat", "preference", "prompt", "pairs"],
        _rows("Format as which the rows are read; auto finds it by the columns, of which prompts may have an answer."),
    ] = "auto"
    columns: Annotated[tuple[str, ...], _rows(COLUMNS_HELP)] = ()
    skip_broken: Annotated[bool, _rows(BROKEN_HELP)] = False
    rows: Annotated[int, _rows("Number of rows to read.", ge=1, le=MAX_INT32)] = 1000
    max_seq_len: Annotated[
        int, _rows("Count the sequences, or prompts, that are longer; 0 counts none.", ge=0, le=MAX_INT32)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_named_columns(self.columns)


def require_named_columns(columns: Sequence[str]) -> None:
    """Raise `InvalidValue` for columns that are not all NAME=COLUMN, each name once."""
    names = [given.partition("=")[0] for given in columns]
    if not all(all(given.partition("=")) for given in columns) or len(set(names)) < len(names):
        raise InvalidValue.of("columns", ",".join(columns), "NAME=COLUMN, each name once")


@dataclass(frozen=True, kw_only=True)
class PreparedSource:
    """One folder of a mixture: its share of the training sequences, and its maximum number of epochs (0: no limit)."""

    path: str
    name: str
    weight: float = 1.0
    epochs: float = 0.0

    @property
    def text(self) -> str:
        """The source in the form that `prepared_sources` parses, PATH:WEIGHT:EPOCHS."""
        return f"{self.path}:{self.weight:g}:{self.epochs:g}"


def prepared_sources(text: str) -> list[PreparedSource]:
    """Parse a mixture in the form `FORM`; raises `InvalidValue` for malformed text, repeated folders or bad numbers."""
    found: list[tuple[str, list[float]]] = []
    for part in text.split(","):
        path, numbers = part.strip(), list[float]()
        while len(numbers) < 2 and (number := _number(path.rpartition(":")[2])) is not None and ":" in path:
            path, numbers = path.rpartition(":")[0], [number, *numbers]
        if not path:
            raise InvalidValue.of("prepared", text, FORM)
        found.append((path, numbers))
    paths = [path for path, _ in found]
    if len(set(paths)) < len(paths):
        raise InvalidValue.of("prepared", text, "each folder once")
    names = [PurePath(path).name for path in paths]
    sources = []
    for place, (path, numbers) in enumerate(found):
        weight, epochs = [*numbers, *(1.0, 0.0)[len(numbers) :]]
        if not (0 < weight < math.inf and 0 <= epochs < math.inf):
            raise InvalidValue.of("prepared", text, "weights above 0, and epochs from 0, which means no maximum")
        name = names[place] if names.count(names[place]) == 1 else f"{names[place]}_{place}"
        sources.append(PreparedSource(path=path, name=name, weight=weight, epochs=epochs))
    return sources


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
