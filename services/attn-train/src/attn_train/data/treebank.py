"""Tagged sentences from treebanks in the CoNLL-U format (https://universaldependencies.org/format.html)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_core.modifiers import DependencyTree
from attn_models.tokenizers import Tokenizer
from attn_schema.text_files import files_of, read_lines
from attn_schema.training import DataConfig

from attn_train.tasks.base import PADDED, split_validation
from attn_train.tasks.seq2seq import learned_tokenizer
from attn_train.tasks.token_classification import UNSEEN, TaggedDataset, TaggedTokens

FIELD = "data.dataset"
COLUMNS = 10
ENDINGS = (".conllu", ".conllu.gz")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, their universal parts of speech, and the index of each word's head, -1 for the root."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of each word in the dependency tree; raises `InvalidValue` if the heads are not a tree."""
        return DependencyTree(self.heads).depths


def treebank_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training and validation files: a single file, or those of a folder with `train` and `dev` in their
    names. Raises `InvalidValue` for a folder without training files."""
    if not path.is_dir():
        return [path], []
    files = [file for file in files_of(path) if file.name.endswith(ENDINGS)]
    training = [file for file in files if "train" in file.name]
    if not training:
        raise InvalidValue.of(FIELD, str(path), "a folder with files *train*.conllu or *train*.conllu.gz")
    return training, [file for file in files if "dev" in file.name]


def read_sentences(paths: Sequence[Path]) -> list[Sentence]:
    """Read the sentences of files; raises `InvalidValue`, with the line, for text that is not CoNLL-U."""
    return [sentence for path in paths for sentence in _sentences(path)]


def _sentences(path: Path) -> Iterator[Sentence]:
    rows: list[list[str]] = []
    for number, line in enumerate(read_lines(path, FIELD), 1):
        if line.startswith("#"):
            continue
        if not line:
            if rows:
                yield _sentence(rows, f"{path}, line {number}")
            rows = []
            continue
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise InvalidValue.of(
                FIELD, f"{path}, line {number}: {line[:60]!r}", f"{COLUMNS} columns, separated by tabs"
            )
        # Contractions (numbered as 1-2), whose words follow on lines of their own, and empty nodes (1.1) are skipped.
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
            raise InvalidValue.of(
                FIELD, f"{where}: the head {row[6]!r}", f"the number of a word, 1 to {len(rows)}, or 0 for the root"
            )
        heads.append(int(row[6]) - 1)
    return Sentence(tuple(row[1] for row in rows), tuple(row[3] for row in rows), tuple(heads))


UNTAGGED = "_"
"""The mark of a missing tag in CoNLL-U; such words are ignored."""


def load_tags(config: DataConfig, context: int, tokenizer: str) -> TaggedDataset:
    """Load and tokenize the sentences of a config; those of more than `context` tokens are not trained on.

    A space is put before each word, so that words get the same byte pairs as in running text. All tokens of a word have
    its depth. Raises `InvalidValue` for files that cannot be read, heads that are not a tree, and if nothing is left.
    """
    training, validation = (read_sentences(paths) for paths in treebank_files(Path(config.path or "")))
    if not validation:
        training, validation = map(list, split_validation(training, config.validation_fraction))
    made = learned_tokenizer(tokenizer, [f" {' '.join(sentence.words)}" for sentence in training])
    names = sorted({tag for sentence in training for tag in sentence.tags} - {UNTAGGED})
    kept = [one for one in tokenize_sentences(training, made, names, context) if not one.missed]
    if not kept or not names:
        allowed = f"at least one sentence with tags and at most {context} tokens"
        raise InvalidValue.of("data", f"{len(training)} sentences", allowed)
    return TaggedDataset(kept, tokenize_sentences(validation, made, names, context), names, made)


def tokenize_sentences(
    sentences: Sequence[Sentence], tokenizer: Tokenizer, names: Sequence[str], context: int
) -> list[TaggedTokens]:
    """Tokenize sentences with tags; of those that do not fit into the context, the words at the end are missed.

    Words with a tag that is not among `names` are `UNSEEN`; those without a tag and the later tokens of each word are
    ignored (`PADDED`).
    """
    numbers = {name: place for place, name in enumerate(names)} | {UNTAGGED: PADDED}
    known: dict[str, list[int]] = {}
    found = []
    for sentence in sentences:
        new = [word for word in dict.fromkeys(sentence.words) if word not in known]
        known |= dict(zip(new, tokenizer.encode_batch([f" {word}" for word in new], add_special=False), strict=True))
        pieces = [known[word] for word in sentence.words]
        tokens = tuple(token for piece in pieces for token in piece)
        classes = tuple(
            number
            for piece, tag in zip(pieces, sentence.tags, strict=True)
            for number in [numbers.get(tag, UNSEEN), *[PADDED] * (len(piece) - 1)][: len(piece)]
        )
        depths = tuple(d for piece, d in zip(pieces, sentence.depths, strict=True) for d in [d] * len(piece))
        heads = tuple(head if head < context else -1 for head in heads_of_pieces(sentence.heads, pieces)[:context])
        if any(number != PADDED for number in classes):
            missed = sum(number != PADDED for number in classes[context:])
            found.append(TaggedTokens(tokens[:context], classes[:context], depths[:context], heads, missed))
    return found


def heads_of_pieces(heads: Sequence[int], pieces: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The head of each token of a sentence whose words have these `heads` and these tokens; see `TaggedTokens`."""
    starts = [0, *accumulate(map(len, pieces))]
    firsts = [-1 if head < 0 else starts[head] for head in heads]
    return tuple(
        place
        for first, own, piece in zip(firsts, starts, pieces, strict=False)
        for place in [first, *[own] * (len(piece) - 1)][: len(piece)]
    )
