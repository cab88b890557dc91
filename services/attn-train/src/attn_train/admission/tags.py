"""Checks of the tagged sentences to train on."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import InvalidValue

from attn_train.admission.sourced import check_tokenizer
from attn_train.admission.text import check_path, roots_of
from attn_train.settings import TrainSettings
from attn_train.spec import DataSpec
from attn_train.treebank import treebank_files


def check_tags(data: DataSpec, *, home: Path, settings: TrainSettings, local: bool) -> None:
    """Raises the error of the first thing that would keep the sentences from being read; they are not read yet."""
    if data.name is not None:
        raise InvalidValue.of("spec.data.name", data.name, "none: a tagger learns from the .conllu files at a path")
    roots = roots_of(home, settings, local=local)
    path = Path(data.path or "")
    check_path(path, roots=roots)
    for files in treebank_files(path):
        for file in files:
            check_path(file, roots=roots)
    check_tokenizer(data, home)
