"""Preferences and pairs of prepared data: records that are read from disk when a batch needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_schema.prepared import PreparedSource
from attn_schema.training import TrainingConfig

from attn_train.data.conversations import PreferencePair
from attn_train.data.rendering import TokenizedChat
from attn_train.data.token_shards.shards import FIELD, TRAIN, PreparedData, PreparedSet, Window
from attn_train.tasks.base import Dataset
from attn_train.tasks.preferences import Example, JudgedChat, PreferenceDataset
from attn_train.tasks.seq2seq import PairDataset, TokenPair

Record = TypeVar("Record")


class Records(Sequence[Record]):
    """The records of a set whose sequences have at most `longest` tokens each, made of their windows by `make`.

    `each` is the number of examples of a record; `lengths` are those of all examples, int64 [examples].
    """

    def __init__(
        self,
        data: PreparedSet,
        make: Callable[[Sequence[Window], int], Record],
        longest: Sequence[float],
        each: int = 1,
    ) -> None:
        self._data, self._make, self._each = data, make, each
        every = [np.zeros((0, data.parts), dtype=np.int64)]
        every += [lengths.reshape(-1, data.parts) for lengths in data.lengths()]
        sizes = np.concatenate(every)
        self._kept = np.flatnonzero((sizes <= np.asarray(longest)).all(axis=1))
        self.left_out = len(sizes) - len(self._kept)
        self.lengths = np.repeat(sizes[self._kept].max(axis=1, initial=0), each)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._kept) * self._each

    def __getitem__(self, place: int) -> Record:  # type: ignore[override]
        """Return the example at a place."""
        if place >= len(self):
            raise IndexError(place)
        record, part = divmod(place, self._each)
        return self._make(self._data.record(int(self._kept[record])), part)


def open_records(config: TrainingConfig) -> Dataset:
    """Open prepared preferences, or the pairs of an encoder-decoder.

    Raises `InvalidValue` for another kind of data, for several folders or one with epochs, and if no record fits.
    """
    preferred = config.data.format == "preference"
    kind = "preference" if preferred else "pairs"
    source, *others = config.data.sources
    if others or source != PreparedSource(path=source.path, name=source.name):
        raise InvalidValue.of(FIELD, config.data.prepared, f"one folder, without weight and epochs, of the kind {kind}")
    data = PreparedData.open(Path(source.path))
    if data.kind != kind:
        raise InvalidValue.of(FIELD, f"{source.path} of the kind {data.kind}", f"the kind {kind} for this job")
    kept = [data.set(name) for name in data.validation_sets]
    return _preferences(data, kept, config) if preferred else _pairs(data, kept, config)


def _preferences(data: PreparedData, kept: Sequence[PreparedSet], config: TrainingConfig) -> Dataset:
    longest = [config.model.sequence_length + 1] * 2
    make, each = (_judged, 2) if config.objective.preference_loss == "kto" else (_pair, 1)
    training: Records[Example] = Records(data.set(TRAIN), make, longest, each)
    validation = [one for own in kept for one in Records[Example](own, make, [np.inf] * 2, each)]
    _require_some(training, data)
    longer = f", {training.left_out} left out as too long" if training.left_out else ""
    return PreferenceDataset(training, validation, data.tokenizer, longer)


def _chat(window: Window) -> TokenizedChat:
    ids = window.ids.astype(np.int64)
    targets = ids if window.learned is None else np.where(window.learned, ids, IGNORED)
    return TokenizedChat(tuple(ids[:-1].tolist()), tuple(targets[1:].tolist()))


def _pair(windows: Sequence[Window], part: int) -> Example:  # noqa: ARG001 -- of one part
    return PreferencePair(*map(_chat, windows))


def _judged(windows: Sequence[Window], part: int) -> Example:
    return JudgedChat(_chat(windows[part]), desirable=not part)


def _pairs(data: PreparedData, kept: Sequence[PreparedSet], config: TrainingConfig) -> Dataset:
    encoder, decoder = config.model.encoder_length, config.model.sequence_length
    training: Records[TokenPair] = Records(data.set(TRAIN), _tokens, [encoder, decoder + 1])
    validation = [one for own in kept for one in Records[TokenPair](own, _tokens, [np.inf] * 2)]
    _require_some(training, data)
    texts = [(data.tokenizer.decode(source), data.tokenizer.decode(target)) for source, target in validation]
    longest = encoder, decoder
    return PairDataset(training, validation, texts, data.tokenizer, longest, left_out=training.left_out)


def _tokens(windows: Sequence[Window], part: int) -> TokenPair:  # noqa: ARG001 -- of one part
    source, target = (tuple(window.ids.tolist()) for window in windows)
    return source, target


def _require_some(training: Sequence[object], data: PreparedData) -> None:
    if not training:
        records = data.set(TRAIN).records
        raise InvalidValue.of(FIELD, f"{data.folder} with {records} records", "at least one that fits max_seq_len")
