"""Checks of the pairs that a model with a source is to learn from."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName

from attn_train.admission.text import check_learned, check_path, roots_of
from attn_train.data import default_tokenizer, tokenizer_folder
from attn_train.loop.pairs import is_learned
from attn_train.pair_data import known_pairs, pair_paths
from attn_train.settings import TrainSettings
from attn_train.spec import DataSpec


def check_pairs(data: DataSpec, *, home: Path, settings: TrainSettings, local: bool) -> None:
    """Raises the error of the first thing that would keep the pairs from being read; they are not read yet."""
    if data.most_pairs < 0:
        raise InvalidValue.of("spec.data.most_pairs", data.most_pairs, "a whole number from 0")
    if data.name is not None:
        if data.name not in known_pairs():
            raise UnknownName.of("set of pairs", data.name, known_pairs())
    else:
        roots = roots_of(home, settings, local=local)
        check_path(Path(data.path or ""), roots=roots)
        for file in pair_paths(Path(data.path or ""), data.languages):
            check_path(file, roots=roots)
    check_tokenizer(data, home)


def check_tokenizer(data: DataSpec, home: Path) -> None:
    """Raises InvalidValue for a tokenizer of pairs or sentences that is neither learned nor there."""
    tokenizer = default_tokenizer(data)
    if is_learned(tokenizer):
        check_learned(tokenizer)
    elif not (Path(tokenizer_folder(tokenizer, home)) / "tokenizer.json").is_file():
        allowed = "'word', 'byte_pairs', 'byte_pairs:N', a model on this server, or a folder with a tokenizer.json"
        raise InvalidValue.of("spec.data.tokenizer", tokenizer, allowed)
