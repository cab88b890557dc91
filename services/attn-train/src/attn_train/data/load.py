"""Loads the dataset that a training configuration names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName
from attn_core.models import ModelFamily
from attn_models.sources import known_sources, pull
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.prompts import TileTexts
from attn_schema.home import model_folder_name, models_folder
from attn_schema.model import DECODER, ModelConfig
from attn_schema.text_files import files_of
from attn_schema.training import DataConfig, TrainingConfig

from attn_train.data.conversations import found_in, read_splits
from attn_train.data.labels import load_labels
from attn_train.data.pairs import CAPTIONS, load_pairs, synthetic_task_pairs
from attn_train.data.pictures import tiles_in
from attn_train.data.shapes import TEXTS
from attn_train.data.synthetic import TASKS
from attn_train.data.token_shards.inputs import has_rows, split_files
from attn_train.data.token_shards.shards import MANIFEST
from attn_train.data.treebank import load_tags
from attn_train.tasks.base import Dataset
from attn_train.tasks.completion import completion_dataset
from attn_train.tasks.grpo import prompt_dataset
from attn_train.tasks.instruction_tuning import chat_dataset
from attn_train.tasks.language_modeling import CHARACTER, TextDataset, read_text, tokenize, tokenize_documents
from attn_train.tasks.masked_language_modeling import MaskedTextDataset
from attn_train.tasks.packed import open_prepared
from attn_train.tasks.preferences import preference_dataset
from attn_train.tasks.prepared_records import open_records
from attn_train.tasks.seq2seq import BYTE_PAIRS, WORD, is_byte_pairs, is_learned_tokenizer

TEXT, PAIRS, MASKED, TAGS, LABELS, IMAGES = "text", "pairs", "masked", "tags", "labels", "images"
"""Kinds of data; the values of `ModelFamily.learns`."""
CLASSES: dict[str, Callable[[DataConfig, int, str], Dataset]] = {TAGS: load_tags, LABELS: load_labels}
"""The functions that load what has classes, by the kind of data."""


def known_texts() -> list[str]:
    """Return the names of the known text datasets."""
    return sorted(source.name for source in known_sources() if source.kind == "text")


def require_known_text(name: str) -> None:
    """Raise `UnknownName`, with similar names, unless `name` is a known text or a synthetic task."""
    known = sorted([*known_texts(), *TASKS])
    if name not in known:
        raise UnknownName.of("dataset", name, known)


def family_named(name: str) -> ModelFamily:
    """Return the installed model family of this name; the plain name `decoder` always means that of attn-models.

    Raises `UnknownName` and `AmbiguousName`.
    """
    return installed().models.get(f"attn-models/{DECODER}" if name == DECODER else name)


def data_kind_of(model: ModelConfig) -> str:
    """Return `ModelFamily.learns` of the model's family; "pairs" for encoder-decoders, "text" for unknown families."""
    if model.is_encoder_decoder:
        return PAIRS
    try:
        return family_named(model.family).learns
    except UnknownName:
        return TEXT


def load_dataset(config: TrainingConfig, home: Path, log: Callable[[str], None]) -> Dataset:
    """Load the dataset of a configuration; raises as `load_text` does."""
    if config.data.prepared:
        records = config.data.format == "preference" or config.model.is_encoder_decoder
        return open_records(config) if records else open_prepared(config.data.sources)
    if config.data.format != "text":
        return load_conversations(config, home)
    return _load_dataset(config, home, log)


def _load_dataset(config: TrainingConfig, home: Path, log: Callable[[str], None]) -> Dataset:
    kind = data_kind_of(config.model)
    if kind == IMAGES:
        from attn_train.data.images import load_images

        return load_images(config.data)
    if kind == MASKED:
        return MaskedTextDataset.of(load_text(config.data, home, log))
    named = tokenizer_of(config.data, home)
    if kind in CLASSES:
        return CLASSES[kind](config.data, config.model.sequence_length, named)
    if config.model.is_encoder_decoder:
        return load_pairs(config.data, config.model, named)
    if config.data.name in TASKS:
        pairs = synthetic_task_pairs(config.data.name, config.data.max_pairs)
        length = config.model.sequence_length
        return completion_dataset(pairs, validation=config.data.validation_fraction, max_length=length)
    return load_text(config.data, home, log)


def load_conversations(config: TrainingConfig, home: Path) -> Dataset:
    """Load the conversations of the file that the config names, formatted with the chat template of its tokenizer."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder(config.data.tokenizer, home))
    length = config.model.sequence_length
    if config.data.format == "prompt":
        return prompt_dataset(config, tokenizer)
    tiles = tiles_of(config, tokenizer, home)
    if config.data.format == "chat":
        return chat_dataset(config.data, tokenizer, max_length=length, tiles=tiles)
    loss = config.objective.preference_loss
    return preference_dataset(config.data, tokenizer, loss=loss, max_length=length, tiles=tiles)


def tiles_of(config: TrainingConfig, tokenizer: Tokenizer, home: Path) -> TileTexts | str:
    """Return what encodes images for the base model of a config, or why it is not trained on images."""
    if config.objective.teacher is not None:
        return "a teacher sees none"
    if config.tp * config.cp > 1:
        return "models that see are not split over workers: tp and cp must be 1"
    name = config.model.base_model or ""
    return tiles_in(model_folder(name, home) or Path(name), tokenizer)


def data_digest(config: TrainingConfig, home: Path, files: Sequence[Path] = ()) -> bytes:
    """Return the BLAKE2 digest of the files that hold the data of a configuration, and of a tokenizer in a folder; and
    of further `files` that the data name.

    Prepared data are read by their manifests, which have the digests of all files.
    """
    paths = [Path(source.path) / MANIFEST for source in config.data.sources]
    if config.data.path is not None:
        path = Path(config.data.path)
        paths += [file for file in sorted(path.rglob("*")) or [path] if file.is_file()]
    tokenizer = Path(tokenizer_folder(config.data.tokenizer, home)) / "tokenizer.json"
    paths += [*([tokenizer] if tokenizer.is_file() else []), *files]
    total = hashlib.blake2b()
    for read in paths:
        with read.open("rb") as file:
            total.update(hashlib.file_digest(file, "blake2b").digest())
    return total.digest()


def tokenizer_of(config: DataConfig, home: Path) -> str:
    """Return the tokenizer of pairs or sentences: the name of a learned one, or a folder."""
    named = default_tokenizer(config)
    return named if is_learned_tokenizer(named) else tokenizer_folder(named, home)


def default_tokenizer(config: DataConfig) -> str:
    """Return the given tokenizer, or the default for pairs: words for synthetic tasks and captions, else byte pairs."""
    if config.tokenizer != CHARACTER:
        return config.tokenizer
    return WORD if config.name in {*TASKS, CAPTIONS} else BYTE_PAIRS


def load_text(config: DataConfig, home: Path, log: Callable[[str], None]) -> TextDataset:
    """Tokenize the text of a config; a known dataset is downloaded into `home` the first time. Files of a folder that
    are named as validation are not trained on, nor those for tests.

    Raises `InvalidValue` or `UnknownName` for a text that cannot be read, `Unavailable` if the download fails.
    """
    path = text_path(config, home, log)
    if has_rows(path):
        training, kept, notes = read_splits(config.replace(dataset=str(path.absolute())), found_in(TEXTS))
        return tokenize_documents(training, kept, tokenizer=_learned_or_folder(config, home), notes=notes)
    splits = split_files(path, files_of(path))
    return tokenize(
        read_text(splits["train"]),
        held_out=read_text(splits["validation"]),
        tokenizer=_learned_or_folder(config, home),
        validation=config.validation_fraction,
    )


def _learned_or_folder(config: DataConfig, home: Path) -> str:
    return config.tokenizer if is_byte_pairs(config.tokenizer) else tokenizer_folder(config.tokenizer, home)


def tokenizer_folder(tokenizer: str, home: Path) -> str:
    """Return a word for a learned tokenizer as it is, else the folder of the model with this name, or the path."""
    if tokenizer == CHARACTER or is_learned_tokenizer(tokenizer):
        return tokenizer
    return str(model_folder(tokenizer, home) or Path(tokenizer))


def model_folder(name: str, home: Path) -> Path | None:
    """Return the folder of the model or adapter with this name, such as OWNER/REPO, in `home`; None without one."""
    models = models_folder(home)
    folder = models / model_folder_name(name)
    return folder if folder.parent == models and name not in {".", ".."} and folder.is_dir() else None


def text_path(config: DataConfig, home: Path, log: Callable[[str], None]) -> Path:
    """Return the path of the text; a known dataset is downloaded into `home`. Raises as `load_text` does."""
    if config.path is not None:
        return Path(config.path)
    if not config.name:
        raise InvalidValue.of("data.dataset", "", "the name of a dataset, or a path on the server")
    require_known_text(config.name)
    log(f"reading {config.name}")
    return pull(config.name, home)
