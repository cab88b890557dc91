"""Language modelling on prepared tokens: rows are packed with several documents, which are computed separately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_core.reinforce import samples_keys
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_schema.prepared import PreparedSource
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.data.token_shards.order import (
    MixedSource,
    Mixture,
    PackedRow,
    Reader,
    RecordReader,
    WindowReader,
    validation_records,
    window_row,
)
from attn_train.data.token_shards.shards import FIELD, TRAIN, PreparedData, PreparedSet
from attn_train.tasks.base import (
    PADDED,
    VALIDATION_ROWS,
    VALIDATION_SEED,
    OnBatch,
    SeededTask,
    TokenDataset,
    count_targets,
    derived,
    in_parts,
    longest_input,
    mean_over_batches,
    training_loss,
    validation_windows,
)

READERS: Mapping[str, Any] = {"text": WindowReader, "chat": RecordReader}
"""The readers of the kinds of prepared data that decoders are trained on."""


@dataclass(frozen=True, eq=False)
class PreparedDataset(TokenDataset):
    """Folders of prepared tokens, as the sources of a mixture, and their common tokenizer."""

    sources: Sequence[tuple[PreparedSource, PreparedData]]
    tokenizer: Tokenizer

    @property
    def summary(self) -> str:
        """The number of tokens and the weight of each folder, and the number of validation tokens."""
        parts = [
            f"{source.name} ({data.set(TRAIN).tokens} tokens, weight {source.weight:g})"
            for source, data in self.sources
        ]
        count = sum(data.tokens for data in self.validation_sets().values())
        return f"{', '.join(parts)}, {count} validation tokens"

    def validation_sets(self) -> dict[str, PreparedSet]:
        """Return the validation sets by name; with several folders, names are prefixed with the folder's."""
        several = len(self.sources) > 1
        return {
            f"{source.name}_{name}" if several else name: data.set(name)
            for source, data in self.sources
            for name in data.validation_sets
        }

    def reader_of(self, data_set: PreparedSet, context: int) -> Reader:
        """Return a reader that makes rows of `context` tokens from a set."""
        reader: Reader = READERS[self.kind_of(data_set)](data_set, context)
        return reader

    def kind_of(self, data_set: PreparedSet) -> str:
        """Return the kind of the data of a set."""
        return next(data.kind for _, data in self.sources if data.folder == data_set.folder)

    def task(self, config: TrainingConfig) -> PackedTask:
        """Return the training task."""
        return PackedTask(self, config)


def open_prepared(sources: Sequence[PreparedSource]) -> PreparedDataset:
    """Open the folders of a mixture.

    Raises `InvalidValue` for a kind that decoders do not support, `Incompatible` for different tokenizers.
    """
    opened = [(source, PreparedData.open(Path(source.path))) for source in sources]
    first = opened[0][1]
    for source, data in opened:
        if data.kind not in READERS:
            allowed = f"the kind {' or '.join(READERS)} for a model of this family"
            raise InvalidValue.of(FIELD, f"{source.path} of the kind {data.kind}", allowed)
        if data.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            problem = f"{source.path} was prepared with another tokenizer than {sources[0].path}"
            raise Incompatible(f"{problem}: prepare both with the same one", field=FIELD)
    return PreparedDataset(opened, first.tokenizer)


class PackedTask(SeededTask):
    """Batches of inputs, documents and targets [batch, tokens]; `documents` numbers the documents within each row.

    `position` is the position of the run in its data. `documents` stay on the CPU, where the lengths are computed.
    """

    on_host = (1,)

    def __init__(self, data: PreparedDataset, config: TrainingConfig) -> None:
        super().__init__(config)
        self._data = data
        self._context = config.model.sequence_length
        self._apart = config.data.document_mask
        parts = [
            MixedSource(s.name, data.reader_of(d.set(TRAIN), self._context), s.weight, s.epochs)
            for s, d in data.sources
        ]
        self._mixture = Mixture(parts, derived(config.seed, "batches"))

    @property
    def max_rows(self) -> float:
        """An upper bound of the rows that can be drawn; infinite if a folder has no maximum number of epochs."""
        return sum(source.max_items for source in self._mixture.sources)

    def position(self) -> dict[str, Tensor]:
        """Return the position for a checkpoint."""
        return self._mixture.position()

    def restore_position(self, position: Mapping[str, Tensor]) -> None:
        """Continue from a position."""
        self._mixture.restore(position)

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return a batch of the next rows of the mixture."""
        batch = self._mixture.batch(self._batch)
        self.tokens += count_targets(batch)
        return batch

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy of the targets."""
        inputs, documents, targets = batch
        if samples_keys(model):
            run = lambda: packed_logits(model, inputs, self._documents(documents))  # noqa: E731
            return self.reinforce.loss(model, run, targets, self._smoothing)
        if lengths_of(self._documents(documents)) is None:
            return training_loss(model, inputs, targets, self._smoothing)
        return self._token_loss(model, batch, self._smoothing)

    def validation_losses(self, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:
        """Return the mean loss over at most `batches` batches of each validation set, by name."""
        found, self.validation_left_out = {}, 0
        for name, validation_set in self._data.validation_sets().items():
            rows = self._validation_batches(validation_set, batches, longest_input(model))
            loss = mean_over_batches(
                model, rows, lambda b: self._token_loss(model, b, 0.0), on_batch, kept=self.on_host
            )
            if loss is not None:
                found[name] = loss
        return found

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean of `validation_losses`; None if there are none."""
        found = self.validation_losses(model, batches, on_batch)
        return sum(found.values()) / len(found) if found else None

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:  # noqa: ARG002 -- the loss says all
        """Return the number of epochs for which each folder was read."""
        return {f"epochs_{name}": epochs for name, epochs in self._mixture.epochs.items()}

    def _validation_batches(self, data: PreparedSet, batches: int, longest: int) -> Iterator[tuple[Tensor, ...]]:
        """Return at most `batches` validation batches of a set, the same in every call, in parts of at most the batch
        size: the `validation_windows` of a text, or conversations, each in a row of its own."""
        if self._data.kind_of(data) == "chat":
            rows, missing = validation_records(data, batches * VALIDATION_ROWS, longest, VALIDATION_SEED)
            self.validation_left_out += missing
        else:
            windows = validation_windows(data.tokens - 1, batches, self._context)
            rows = [window_row(data, start, stop) for start, stop in windows]
        return in_parts(rows, collate_rows, self._batch)

    def _documents(self, documents: Tensor) -> Tensor | None:
        return documents if self._apart else None

    def _token_loss(self, model: nn.Module, batch: tuple[Tensor, ...], smoothing: float) -> Tensor:
        inputs, documents, targets = batch
        if lengths := lengths_of(self._documents(documents)):
            own: Any = model
            loss: Tensor = own.next_token_loss(
                inputs.reshape(1, -1), targets.reshape(1, -1), PADDED, smoothing, lengths=lengths
            )
            return loss
        return next_token_loss(model, inputs, targets, smoothing)


def collate_rows(rows: Sequence[PackedRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, documents and targets of rows, int64 [rows, longest], padded at the end."""
    inputs, targets, documents = ([torch.from_numpy(part) for part in parts] for parts in zip(*rows, strict=True))
    return (
        pad_sequence(inputs, batch_first=True),
        pad_sequence(documents, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=PADDED),
    )


def lengths_of(documents: Tensor | None) -> list[int] | None:
    """Return the lengths of the documents of rows [batch, tokens], concatenated; None if each row is one document.

    `documents` must be on the CPU: reading them from a GPU would force a synchronisation.
    """
    if documents is None:
        return None
    numbers = documents.numpy()
    begins = np.ones(numbers.shape, dtype=bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    if begins.sum() == len(begins):
        return None
    counts: list[int] = np.diff(np.flatnonzero(begins), append=begins.size).tolist()
    return counts


def packed_logits(model: Any, inputs: Tensor, documents: Tensor | None) -> Tensor:
    """Return logits [batch, tokens, vocabulary] of inputs [batch, tokens], with documents computed separately."""
    lengths = lengths_of(documents)
    if lengths is None:
        logits: Tensor = model(inputs)
        return logits
    flat: Tensor = model.logits(model.hidden(inputs.reshape(1, -1), lengths=lengths))
    return flat.view(*inputs.shape, -1)


def require_document_mask(model: nn.Module) -> None:
    """Raise `Incompatible` for a model that cannot compute the documents of a row separately."""
    field = "config.data.document_mask"
    if not getattr(model, "takes_lengths", False):
        raise Incompatible(
            f"{type(model).__name__} cannot separate the documents of a row: document_mask must be false", field=field
        )
    if len(getattr(model, "predictors", ())):
        problem = "multi-token prediction reaches over the ends of documents"
        raise Incompatible(f"{problem}: document_mask must be false with num_nextn_predict_layers", field=field)
    try:
        model.require_documents()  # type: ignore[operator]
    except Incompatible as error:
        raise Incompatible(f"{error.message}: document_mask must be false", field=field) from error
