"""Token classification: tagging of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_models.losses import mean_cross_entropy
from attn_models.tokenizers import Tokenizer
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    in_parts,
    mean_over_batches,
    validation_sample,
)

UNSEEN = -1


@dataclass(frozen=True)
class TaggedTokens:
    """The tokens of a sentence, the class of each word at its first token (else PADDED), the depth of its word, and the
    token that it depends on: the first of the word's head, -1 for the root, and for further tokens the word's first.

    A word with a tag that no training sentence has is of the class UNSEEN, and `missed` words do not fit into the
    context: no model is right about them.
    """

    tokens: tuple[int, ...]
    classes: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    missed: int = 0


@dataclass(frozen=True, eq=False)
class TaggedDataset:
    """Training and validation sentences, the `names` of the tags, and the tokenizer."""

    training: Sequence[TaggedTokens]
    validation: Sequence[TaggedTokens]
    names: Sequence[str]
    tokenizer: Tokenizer

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The vocabulary size and the number of tags."""
        return {"vocab_size": self.tokenizer.vocab_size, "classes": len(self.names)}

    @property
    def summary(self) -> str:
        """The number of sentences."""
        return f"{len(self.training)} training and {len(self.validation)} validation sentences"

    def task(self, config: TrainingConfig) -> TokenClassificationTask:
        """Return the training task."""
        return TokenClassificationTask(self, config)

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model with the tag names and the tokenizer, and return the folder."""
        from attn_models.loading.encoders import save_classifier

        return save_classifier(folder, model, self.names, self.tokenizer)


class TokenClassificationTask(CollatedTask):
    """Batches of sentences, padded at the end; each word is classified at its first token."""

    def __init__(self, sentences: TaggedDataset, config: TrainingConfig) -> None:
        super().__init__(config, sentences, lambda one: len(one.tokens), collate)
        self._sentences = sentences

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy, in nats per word."""
        return self.reinforce.loss(model, lambda: model(*batch[:-1]), batch[-1], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches; words of unseen tags and those that do not
        fit into the context are left out, and counted."""
        chosen = validation_sample(self._sentences.validation, batches)
        self.validation_left_out = sum(one.missed + one.classes.count(UNSEEN) for one in chosen)
        drawn = (
            (*inputs, classes.masked_fill(classes == UNSEEN, PADDED))
            for *inputs, classes in in_parts(chosen, collate, self._batch)
        )
        return mean_over_batches(model, drawn, lambda batch: _loss(model, batch), on_batch)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the accuracy over all validation words."""
        accuracy = tagging_accuracy(model, self._sentences.validation, self._batch, on_batch)
        return {} if accuracy is None else {"accuracy": accuracy}


def collate(sentences: Sequence[TaggedTokens]) -> tuple[Tensor, ...]:
    """Return tokens, padding mask (True: real), depths, heads and classes [batch, longest], padded at the end."""
    tokens, classes, depths, heads = (
        [torch.tensor(getattr(one, part)) for one in sentences] for part in ("tokens", "classes", "depths", "heads")
    )
    padded = pad_sequence(tokens, batch_first=True)
    key_padding_mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in tokens])[:, None]
    goals = pad_sequence(classes, batch_first=True, padding_value=PADDED)
    trees = pad_sequence(heads, batch_first=True, padding_value=-1)
    return padded, key_padding_mask, pad_sequence(depths, batch_first=True), trees, goals


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_cross_entropy(model(*batch[:-1]), batch[-1], PADDED)


def tagging_accuracy(
    model: nn.Module, sentences: Sequence[TaggedTokens], batch: int, on_batch: OnBatch = lambda: None
) -> float | None:
    """Return the share of all words of the sentences whose class the model finds; None without words.

    The model's mode is restored.
    """

    def right(parts: tuple[Tensor, ...]) -> Tensor:
        goals = parts[-1]
        share: Tensor = (model(*parts[:-1]).argmax(-1) == goals)[goals != PADDED].float().mean()
        return share

    found = mean_over_batches(model, in_parts(sentences, collate, batch), right, on_batch)
    words = sum(len(one.classes) - one.classes.count(PADDED) for one in sentences)
    missed = sum(one.missed for one in sentences)
    return None if found is None else found * words / (words + missed)
