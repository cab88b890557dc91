"""Sentences with tags and trees, from files in the CoNLL-U format (https://universaldependencies.org/format.html)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_core.modifiers import DependencyTree

from attn_train.text_lines import text_lines

FIELD = "data.path"
COLUMNS = 10
ENDINGS = (".conllu", ".conllu.gz")


@dataclass(frozen=True)
class Sentence:
    """Words, the universal part of speech of each, and for each the word that it depends on, -1 for the root."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from each word to the root of the tree; raises `InvalidValue` for heads that are no tree."""
        return DependencyTree(self.heads).depths


def treebank_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files to train on and those kept for validation: one file, or those of a folder with `train` and `dev` in
    their names. Raises `InvalidValue` for a folder without any to train on."""
    if not path.is_dir():
        return [path], []
    files = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS) and file.is_file())
    training = [file for file in files if "train" in file.name]
    if not training:
        raise InvalidValue.of(FIELD, str(path), "a folder with files *train*.conllu or *train*.conllu.gz")
    return training, [file for file in files if "dev" in file.name]


def sentences_of(paths: Sequence[Path]) -> list[Sentence]:
    """The sentences of files; raises `InvalidValue` with the line for what is not in the format."""
    return [sentence for path in paths for sentence in _sentences(path)]


def _sentences(path: Path) -> Iterator[Sentence]:
    rows: list[list[str]] = []
    for number, line in enumerate(text_lines(path), 1):
        if line.startswith("#"):
            continue
        if not line:
            if rows:
                yield _sentence(rows, f"{path}, line {number}")
            rows = []
            continue
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise InvalidValue.of(FIELD, f"{path}, line {number}: {line[:60]!r}", f"{COLUMNS} columns between tabs")
        # Words that were contracted stand alone in the lines below; words that are left out have a decimal number.
        if columns[0].isdecimal():
            rows.append(columns)
    if rows:
        yield _sentence(rows, str(path))


def _sentence(rows: Sequence[Sequence[str]], where: str) -> Sentence:
    numbers = [int(row[0]) for row in rows]
    if numbers != list(range(1, len(rows) + 1)):
        raise InvalidValue.of(FIELD, f"{where}: words numbered {numbers[:5]}...", "1, 2, 3, ...")
    heads = []
    for row in rows:
        if not row[6].isdecimal() or int(row[6]) > len(rows):
            raise InvalidValue.of(FIELD, f"{where}: the head {row[6]!r}", f"a word from 1 to {len(rows)}, or 0")
        heads.append(int(row[6]) - 1)
    return Sentence(tuple(row[1] for row in rows), tuple(row[3] for row in rows), tuple(heads))
