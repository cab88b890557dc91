"""Labelled texts: files of LABEL<tab>TEXT, or the included questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName
from attn_models.tokenizers import Tokenizer
from attn_schema.text_files import files_of, read_lines
from attn_schema.training import DataConfig

from attn_train.data.conversations import found_in, read_splits
from attn_train.data.pairs import SAMPLE_FILE, VALIDATION
from attn_train.data.shapes import LABELS
from attn_train.data.token_shards.inputs import has_rows
from attn_train.tasks.base import split_validation
from attn_train.tasks.seq2seq import learned_tokenizer
from attn_train.tasks.token_classification import TaggedDataset, TaggedTokens

FIELD = "config.data.dataset"
ENDINGS = (".tsv", ".tsv.gz")
QUESTIONS = "questions"
INCLUDED = {QUESTIONS: "English sentences of Tatoeba without their last mark, and whether it was a question's"}
"""The labelled texts that are included, and what they hold."""


@dataclass(frozen=True)
class LabelledText:
    """A text and its label."""

    label: str
    text: str


@dataclass(frozen=True, eq=False)
class LabelledDataset(TaggedDataset):
    """Training and validation texts, as sequences of one class each; `cut` texts were longer than the context."""

    cut: int = 0
    notes: str = ""

    @property
    def summary(self) -> str:
        """The numbers of texts."""
        cut = f"; {self.cut} were cut at the context" if self.cut else ""
        return f"{len(self.training)} training and {len(self.validation)} validation texts{cut}{self.notes}"


def label_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training and validation files: a single file, or those of a folder with `train` and one of
    `VALIDATION` in their names. Raises `InvalidValue` for a folder without training files."""
    if not path.is_dir():
        return [path], []
    files = [file for file in files_of(path) if file.name.endswith(ENDINGS)]
    training = [file for file in files if "train" in file.name]
    if not training:
        raise InvalidValue.of(FIELD, str(path), "a folder with files *train*.tsv or *train*.tsv.gz")
    return training, [file for file in files if any(part in file.name for part in VALIDATION) and file not in training]


def labelled_texts(config: DataConfig) -> tuple[list[LabelledText], list[LabelledText], str]:
    """Return the texts for training and validation at the path of a config, and what was left out, as text."""
    path = Path(config.path or "")
    if not has_rows(path, headed=bool(config.columns)):
        files = label_files(path)
        return read_labels(files[0]), read_labels(files[1]), ""
    training, validation, notes = read_splits(config, found_in(LABELS))
    return [LabelledText(*one) for one in training], [LabelledText(*one) for one in validation], notes


def read_labels(paths: Sequence[Path]) -> list[LabelledText]:
    """Read the texts of files; raises `InvalidValue`, with the line, for one without a label or a text."""
    found = []
    for path in paths:
        for number, line in enumerate(read_lines(path, FIELD), 1):
            label, _, text = (part.strip() for part in line.partition("\t"))
            if not line.strip():
                continue
            if not label or not text:
                allowed = "lines with the columns LABEL and TEXT, separated by a tab"
                raise InvalidValue.of(FIELD, f"{path}, line {number}: {line[:60]!r}", allowed)
            found.append(LabelledText(label, text))
    return found


def questions() -> list[LabelledText]:
    """The sentences that end with a full stop or a question mark, without it."""
    lines = (line.partition("\t")[0].strip() for line in read_lines(SAMPLE_FILE, FIELD))
    kinds = {".": "statement", "?": "question"}
    return [LabelledText(kinds[line[-1]], line[:-1]) for line in lines if line[-1:] in kinds and len(line) > 1]


def load_labels(config: DataConfig, context: int, tokenizer: str) -> LabelledDataset:
    """Load and tokenize the texts of a config, cut at `context` tokens.

    Raises `InvalidValue` for files that cannot be read, fewer than two labels, and a validation text with a label that
    no training text has; `UnknownName` for an unknown name.
    """
    if config.name is not None:
        if config.name not in INCLUDED:
            raise UnknownName.of("set of labelled texts", config.name, list(INCLUDED))
        training, validation, notes = questions(), list[LabelledText](), ""
    else:
        training, validation, notes = labelled_texts(config)
    if not validation:
        training, validation = map(list, split_validation(training, config.validation_fraction))
    names = sorted({one.label for one in training})
    if len(names) < 2:
        raise InvalidValue.of("data", f"{len(training)} texts with the labels {names}", "texts of two labels or more")
    made = learned_tokenizer(tokenizer, [one.text for one in training])
    both = [tokenize_labels(texts, made, names) for texts in (training, validation)]
    cut = sum(len(one.tokens) > context for texts in both for one in texts)
    shorter = [[shortened(one, context) for one in texts] for texts in both]
    return LabelledDataset(shorter[0], shorter[1], names, made, cut=cut, notes=notes)


def tokenize_labels(texts: Sequence[LabelledText], tokenizer: Tokenizer, names: Sequence[str]) -> list[TaggedTokens]:
    """Tokenize texts, of which each is one class; raises `InvalidValue` for a label that is not among `names`."""
    if unknown := sorted({one.label for one in texts} - set(names)):
        raise InvalidValue.of("data", f"texts with the labels {', '.join(unknown)}", f"only {', '.join(names)}")
    ids = tokenizer.encode_batch([one.text for one in texts], add_special=False)
    return [
        TaggedTokens(tuple(tokens), (names.index(one.label),), (0,) * len(tokens), (-1,) * len(tokens))
        for one, tokens in zip(texts, ids, strict=True)
    ]


def shortened(one: TaggedTokens, context: int) -> TaggedTokens:
    """The first `context` tokens of a text."""
    return TaggedTokens(one.tokens[:context], one.classes, one.depths[:context], one.heads[:context])
