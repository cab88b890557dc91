"""The dataset that a training configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName
from attn_models.sources import known_sources, pull

from attn_train.data.pairs import CAPTIONS, load_pairs, synthetic_task_pairs
from attn_train.data.synthetic import TASKS
from attn_train.data.treebank import load_tags
from attn_train.spec import DataSpec, FamilyModelSpec, ModelSpec, SourceModelSpec, TrainingSpec
from attn_train.tasks.base import Dataset
from attn_train.tasks.completion import completion_dataset
from attn_train.tasks.language_modeling import CHARACTER, TextDataset, read_text, tokenize
from attn_train.tasks.masked_language_modeling import MaskedTextDataset
from attn_train.tasks.seq2seq import BYTE_PAIRS, WORD, is_byte_pairs, is_learned_tokenizer

TEXT, PAIRS, MASKED, TAGS, IMAGES = "text", "pairs", "masked", "tags", "images"
"""What is learned from: `ModelFamily.learns`."""


def known_texts() -> list[str]:
    """The data sets known by name."""
    return sorted(source.name for source in known_sources() if source.kind == "text")


def require_known_text(name: str) -> None:
    """Raises UnknownName with near names unless there is a data set `name`, or a rule that makes one."""
    known = sorted([*known_texts(), *TASKS])
    if name not in known:
        raise UnknownName.of("data set", name, known)


def data_kind_of(model: ModelSpec | FamilyModelSpec) -> str:
    """What the model's family learns from, as `ModelFamily.learns` says it, or "pairs" where it reads a source."""
    if isinstance(model, SourceModelSpec):
        return PAIRS
    return next((family.learns for family in installed().models if family.name == model.family), TEXT)


def load_dataset(spec: TrainingSpec, home: Path, log: Callable[[str], None]) -> Dataset:
    """What the model is to learn from; raises as `load_text`."""
    subject = data_kind_of(spec.model)
    if subject == IMAGES:
        from attn_train.data.images import load_images

        return load_images(spec.data)
    if subject == MASKED:
        return MaskedTextDataset.of(load_text(spec.data, home, log))
    named = tokenizer_of(spec.data, home)
    if subject == TAGS:
        return load_tags(spec.data, spec.model.max_seq_len, named)
    if isinstance(spec.model, SourceModelSpec):
        return load_pairs(spec.data, spec.model, named)
    if spec.data.name in TASKS:
        pairs = synthetic_task_pairs(spec.data.name, spec.data.max_pairs)
        return completion_dataset(pairs, validation=spec.data.validation, longest=spec.model.max_seq_len)
    return load_text(spec.data, home, log)


def tokenizer_of(spec: DataSpec, home: Path) -> str:
    """The tokenizer of pairs or sentences: one that is learned, or a folder."""
    named = default_tokenizer(spec)
    return named if is_learned_tokenizer(named) else tokenizer_folder(named, home)


def default_tokenizer(spec: DataSpec) -> str:
    """The tokenizer of pairs; words where a rule made them, else byte pairs."""
    if spec.tokenizer != CHARACTER:
        return spec.tokenizer
    return WORD if spec.name in {*TASKS, CAPTIONS} else BYTE_PAIRS


def load_text(spec: DataSpec, home: Path, log: Callable[[str], None]) -> TextDataset:
    """The tokens of the text; a data set known by name is fetched into `home` the first time.

    Raises InvalidValue or UnknownName for what cannot be read, Unavailable if it cannot be fetched.
    """
    return tokenize(
        read_text(text_path(spec, home, log)),
        tokenizer=spec.tokenizer if is_byte_pairs(spec.tokenizer) else tokenizer_folder(spec.tokenizer, home),
        validation=spec.validation,
    )


def tokenizer_folder(tokenizer: str, home: Path) -> str:
    """ "character", or the folder of a tokenizer: of the model of that name in `home`, or at that path."""
    if tokenizer == CHARACTER:
        return CHARACTER
    named = home / "models" / tokenizer
    return str(named if "/" not in tokenizer and named.is_dir() else Path(tokenizer))


def text_path(spec: DataSpec, home: Path, log: Callable[[str], None]) -> Path:
    """Where the text is, fetched into `home` where it is known by name; raises as `load_text`."""
    if spec.path is not None:
        return Path(spec.path)
    if spec.name is None:
        raise InvalidValue.of("data", "neither a name nor a path", "one of them")
    require_known_text(spec.name)
    log(f"reading {spec.name}")
    return pull(spec.name, home)
