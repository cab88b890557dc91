"""Masked language modelling (Devlin et al. 2019, arXiv 1810.04805, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import with_mask
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional

from attn_train.tasks.base import VALIDATION_ROWS, VALIDATION_SEED, OnBatch, RandomWindows, derived, parts_of, to_device
from attn_train.tasks.language_modeling import TextDataset
from attn_train.tasks.reinforce import Reinforce

MASK_FRACTION = 0.15
"""The fraction of tokens to predict."""
MASKED, REPLACED = 0.8, 0.1
"""The shares of chosen tokens that are replaced by the mask and by a random token; the others are not changed."""
FINAL_BATCHES = 50
"""The number of validation batches of the final accuracy."""


@dataclass(frozen=True, eq=False)
class MaskedTextDataset:
    """A text, and a tokenizer with a mask token, which does not occur in the text."""

    text: TextDataset
    tokenizer: Tokenizer

    @classmethod
    def of(cls, text: TextDataset) -> MaskedTextDataset:
        """Create the dataset; a mask token is appended to the vocabulary unless the tokenizer has one."""
        return cls(text, with_mask(text.tokenizer))

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The vocabulary size."""
        return {"vocab_size": self.tokenizer.vocab_size}

    @property
    def summary(self) -> str:
        """The number of tokens."""
        return self.text.summary

    def task(self, config: TrainingConfig) -> MaskedLanguageModelingTask:
        """Return the training task."""
        return MaskedLanguageModelingTask(self, config)

    def save(self, folder: Path, model: Any) -> Path:
        """Save the encoder with its masked language modelling head and tokenizer, and return the folder."""
        from attn_models.loading.encoders import save_masked

        return save_masked(folder, model, self.tokenizer)


class Masking:
    """Draws random windows, and masks 15 % of the tokens of each, at least one."""

    def __init__(self, tokens: Tensor, tokenizer: Tokenizer, *, context: int, batch: int, seed: int) -> None:
        if tokenizer.mask_id is None:
            raise InvalidValue.of("tokenizer", "a tokenizer without a mask token", "a tokenizer with one")
        if context < 2:
            raise InvalidValue.of("model.max_seq_len", context, "at least 2 tokens, one as context and one to predict")
        # The inputs of `RandomWindows` and its last target together are one window of `context` tokens.
        self._windows = RandomWindows(tokens, context=context - 1, batch=batch, seed=seed)
        self.generator = self._windows.generator
        self._mask, self._vocabulary = tokenizer.mask_id, tokenizer.vocab_size
        self.chosen = max(1, round(MASK_FRACTION * context))

    def next_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return masked token ids [batch, tokens], and the chosen positions and their true ids, [batch, chosen] each.

        All are int64.
        """
        head, after = self._windows.next_batch()
        tokens = torch.cat([head, after[:, -1:]], dim=1)
        places = torch.rand(tokens.shape, generator=self.generator).topk(self.chosen, dim=1).indices
        truth = tokens.gather(1, places)
        draw = torch.rand(truth.shape, generator=self.generator)
        other = torch.randint(self._vocabulary, truth.shape, generator=self.generator)
        shown = torch.where(draw < MASKED, self._mask, torch.where(draw < MASKED + REPLACED, other, truth))
        return tokens.scatter(1, places, shown), places, truth


class MaskedLanguageModelingTask:
    """Batches of masked windows; only the chosen positions are predicted."""

    def __init__(self, dataset: MaskedTextDataset, config: TrainingConfig) -> None:
        self._dataset = dataset
        self._context, self._batch = config.model.sequence_length, config.optimizer.batch_size
        self._smoothing = config.optimizer.label_smoothing
        self._masking = self._masked(dataset.text.training, derived(config.seed, "batches"), self._batch)
        self.generator = self._masking.generator
        self.tokens = 0
        self.reinforce = Reinforce()

    def next_batch(self) -> tuple[Tensor, ...]:
        """See `Masking.next_batch`."""
        self.tokens += self._batch * self._masking.chosen
        return self._masking.next_batch()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy, in nats per chosen position."""
        return self.reinforce.loss(model, lambda: masked_logits(model, batch), batch[2], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over the validation text; None if it is shorter than a window."""
        return self._validated(model, batches, on_batch).get("loss")

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the accuracy of the predictions on the validation text."""
        found = self._validated(model, FINAL_BATCHES, on_batch)
        return {"masked_accuracy": found["accuracy"]} if found else {}

    def _validated(self, model: nn.Module, batches: int, on_batch: OnBatch) -> Mapping[str, float]:
        if len(self._dataset.text.validation) < self._context:
            return {}
        masking = self._masked(self._dataset.text.validation, VALIDATION_SEED, VALIDATION_ROWS)
        return masked_metrics(model, parts_of(masking.next_batch, batches, self._batch), on_batch)

    def _masked(self, tokens: Tensor, seed: int, batch: int) -> Masking:
        return Masking(tokens, self._dataset.tokenizer, context=self._context, batch=batch, seed=seed)


def masked_logits(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the logits [batch, chosen, vocabulary] at the chosen positions of a batch of `Masking`."""
    tokens, places, _ = batch
    rows = model.encoder(tokens)
    logits: Tensor = model.logits(rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1])))
    return logits


def masked_metrics(
    model: nn.Module, batches: Iterable[tuple[Tensor, ...]], on_batch: OnBatch = lambda: None
) -> dict[str, float]:
    """Return the mean "loss" of batches of `Masking`, in nats per prediction, and the "accuracy".

    The model's mode is restored.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    loss = right = 0.0
    count = 0
    with torch.inference_mode():
        for drawn in batches:
            batch = to_device(drawn, device)
            logits = masked_logits(model, batch)
            loss += functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten(), reduction="sum").item()
            right += (logits.argmax(-1) == batch[2]).sum().item()
            count += batch[2].numel()
            on_batch()
    model.train(training)
    return {"loss": loss / count, "accuracy": right / count}
