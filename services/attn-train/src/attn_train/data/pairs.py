"""Pairs of source and target: synthetic tasks, the included sample, or files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName
from attn_schema.model import ModelConfig
from attn_schema.text_files import read_lines
from attn_schema.training import DataConfig

from attn_train.data.conversations import found_in, read_splits
from attn_train.data.shapes import PAIRS
from attn_train.data.synthetic import PAIRS as SYNTHETIC
from attn_train.data.synthetic import TASKS, caption_pairs, synthetic_pairs
from attn_train.data.token_shards.inputs import has_rows
from attn_train.tasks.base import split_validation
from attn_train.tasks.seq2seq import PairDataset, TextPair, tokenize_pairs

SAMPLE = "tatoeba-en-zh"
"""English and Chinese sentences of Tatoeba (CC BY 2.0 FR; the third column names the authors)."""
SAMPLE_FILE = Path(__file__).parent / "samples" / "tatoeba-en-zh.tsv.gz"
CAPTIONS, IMAGES = "captions", 10_000
"""The name of the captioned images of handwritten digits, and their maximum number."""
INCLUDED = {
    SAMPLE: "English and Chinese sentences of Tatoeba",
    CAPTIONS: "images of one or two handwritten digits, and what stands where",
}
"""The sets of pairs that are included, and what they hold."""
RULE_SEED = 1
MAX_PAIRS = 10_000_000
VALIDATION = ("val", "valid", "dev")
"""Names of the files for validation in a folder of pairs."""


def known_pair_sets() -> list[str]:
    """Return the names of the known sets of pairs."""
    return sorted([*TASKS, *INCLUDED])


def load_pairs(config: DataConfig, model: ModelConfig, tokenizer: str) -> PairDataset:
    """Load and tokenize the pairs of a config; raises `InvalidValue` or `UnknownName` if they cannot be read."""
    *both, notes = _texts(config)
    training, validation = ([pair for pair in pairs if all(pair)] for pairs in both)
    empty = sum(map(len, both)) - len(training) - len(validation)
    if not validation:
        training, validation = map(list, split_validation(training, config.validation_fraction))
    lengths = model.encoder_length, model.sequence_length
    found = tokenize_pairs(training, validation, tokenizer=tokenizer, longest=lengths)
    return replace(found, empty=empty, notes=notes)


def synthetic_task_pairs(rule: str, max_pairs: int = 0) -> list[TextPair]:
    """Return the pairs of a synthetic task, at most `max_pairs` of them; 0 means all."""
    return synthetic_pairs(rule, min(max_pairs or SYNTHETIC, SYNTHETIC), RULE_SEED)


def pair_paths(path: Path, languages: str) -> list[Path]:
    """Return the files of a path: the file itself, or in a folder the source and target for training, then validation.

    Raises `InvalidValue` for a file with `languages`, a folder without them, and for missing training files.
    """
    if not path.is_dir():
        if languages:
            raise InvalidValue.of(
                "config.data.languages", languages, "none for a single file, whose columns are source and target"
            )
        return [path]
    sides = languages.split("-")
    if len(sides) != 2 or not all(side.isalnum() for side in sides):
        raise InvalidValue.of("config.data.languages", languages, "FROM-TO, such as en-de, for a folder of pairs")
    found = [_of_side(path, "train", side) for side in sides]
    part = next((name for name in VALIDATION for side in sides if _find_side(path, name, side)), None)
    return found if part is None else [*found, *(_of_side(path, part, side) for side in sides)]


def _find_side(folder: Path, part: str, side: str) -> Path | None:
    return next((p for p in (folder / f"{part}.{side}", folder / f"{part}.{side}.gz") if p.is_file()), None)


def _of_side(folder: Path, part: str, side: str) -> Path:
    found = _find_side(folder, part, side)
    if found is not None:
        return found
    raise InvalidValue.of("config.data.dataset", str(folder), f"a folder with {part}.{side} or {part}.{side}.gz")


def _texts(config: DataConfig) -> tuple[list[TextPair], list[TextPair], str]:
    """Return the pairs for training and validation, and what was left out in reading rows, as text."""
    max_pairs = config.max_pairs or MAX_PAIRS
    if config.name is not None:
        if config.name == SAMPLE:
            return _columns(SAMPLE_FILE, max_pairs), [], ""
        if config.name == CAPTIONS:
            return *caption_pairs(min(max_pairs, IMAGES), RULE_SEED), ""
        if config.name not in TASKS:
            raise UnknownName.of("set of pairs", config.name, known_pair_sets())
        return synthetic_task_pairs(config.name, config.max_pairs), [], ""
    if has_rows(Path(config.path or ""), headed=bool(config.columns)):
        training, kept, notes = read_splits(config, found_in(PAIRS))
        return training[:max_pairs], kept, notes
    files = pair_paths(Path(config.path or ""), config.languages)
    if len(files) == 1:
        return _columns(files[0], max_pairs), [], ""
    training = _sides(files[0], files[1], max_pairs)
    return training, _sides(files[2], files[3], max_pairs) if len(files) == 4 else [], ""


def _sides(source: Path, target: Path, max_pairs: int) -> list[TextPair]:
    one, other = (list(islice(_lines(path), max_pairs)) for path in (source, target))
    if len(one) != len(other):
        raise InvalidValue.of(
            "config.data.dataset", str(target), f"a file with as many lines as {source} ({len(one)}), not {len(other)}"
        )
    return list(zip(one, other, strict=True))


def _columns(path: Path, max_pairs: int) -> list[TextPair]:
    pairs = []
    for number, line in enumerate(islice(_lines(path), max_pairs), 1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise InvalidValue.of(
                "config.data.dataset",
                f"{path}, line {number}: {line[:60]!r}",
                "lines with the columns SOURCE and TARGET, separated by a tab",
            )
        pairs.append((columns[0].strip(), columns[1].strip()))
    return pairs


def _lines(path: Path) -> Iterator[str]:
    return (line.strip(" \r\n") for line in read_lines(path, "config.data.dataset"))
