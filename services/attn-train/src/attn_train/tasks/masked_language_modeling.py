"""Masked language modelling (Devlin et al. 2019, arXiv 1810.04805, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import with_mask
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from attn_train.tasks.base import (
    VALIDATION_SEED,
    OnBatch,
    RandomWindows,
    derived,
    in_parts,
    to_device,
    validation_windows,
)
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
        if context < 2:
            raise InvalidValue.of("model.max_seq_len", context, "at least 2 tokens, one as context and one to predict")
        # The inputs of `RandomWindows` and its last target together are one window of `context` tokens.
        self._windows = RandomWindows(tokens, context=context - 1, batch=batch, seed=seed)
        self.generator = self._windows.generator
        self._mask, self._vocabulary = mask_of(tokenizer), tokenizer.vocab_size
        self.chosen = max(1, round(MASK_FRACTION * context))

    def next_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return masked token ids [batch, tokens], and the chosen positions and their true ids, [batch, chosen] each.

        All are int64.
        """
        head, after = self._windows.next_batch()
        tokens = torch.cat([head, after[:, -1:]], dim=1)
        places = torch.rand(tokens.shape, generator=self.generator).topk(self.chosen, dim=1).indices
        truth = tokens.gather(1, places)
        return tokens.scatter(1, places, changed(truth, self._mask, self._vocabulary, self.generator)), places, truth


def changed(truth: Tensor, mask: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return what is shown instead of the chosen tokens `truth`: the mask, a random token, or the token itself."""
    draw = torch.rand(truth.shape, generator=generator)
    other = torch.randint(vocabulary, truth.shape, generator=generator)
    return torch.where(draw < MASKED, mask, torch.where(draw < MASKED + REPLACED, other, truth))


class MaskedText:
    """A text for validation, int64 `tokens`, of which the same tokens are chosen and masked alike in each evaluation,
    in whatever windows the text is read."""

    def __init__(self, tokens: Tensor, tokenizer: Tokenizer) -> None:
        generator = torch.Generator().manual_seed(VALIDATION_SEED)
        self.tokens = tokens
        self._chosen = torch.rand(tokens.shape, generator=generator) < MASK_FRACTION
        shown = changed(tokens, mask_of(tokenizer), tokenizer.vocab_size, generator)
        self._shown = torch.where(self._chosen, shown, tokens)

    def batches(self, batches: int, context: int, batch: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield the `validation_windows` of `batches`, at most `batch` of equal length together, as
        `Masking.next_batch` does; rows with fewer chosen positions than others have `IGNORED` truths."""
        windows = validation_windows(len(self.tokens), batches, context)
        for length in {stop - start: None for start, stop in windows}:
            # An encoder reads in both directions, and would read padding.
            yield from in_parts([one for one in windows if one[1] - one[0] == length], self._collate, batch)

    def _collate(self, windows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        places = [self._chosen[start:stop].nonzero()[:, 0] for start, stop in windows]
        truths = [self.tokens[start:stop][chosen] for (start, stop), chosen in zip(windows, places, strict=True)]
        shown = [self._shown[start:stop] for start, stop in windows]
        return (
            torch.stack(shown),
            pad_sequence(places, batch_first=True),
            pad_sequence(truths, batch_first=True, padding_value=IGNORED),
        )


def mask_of(tokenizer: Tokenizer) -> int:
    """Return the id of the mask token; raises `InvalidValue` if there is none."""
    if tokenizer.mask_id is None:
        raise InvalidValue.of("tokenizer", "a tokenizer without a mask token", "a tokenizer with one")
    return tokenizer.mask_id


class MaskedLanguageModelingTask:
    """Batches of masked windows; only the chosen positions are predicted."""

    def __init__(self, dataset: MaskedTextDataset, config: TrainingConfig) -> None:
        self._dataset = dataset
        self._context, self._batch = config.model.sequence_length, config.optimizer.batch_size
        self._smoothing = config.optimizer.label_smoothing
        seed = derived(config.seed, "batches")
        self._masking = Masking(
            dataset.text.training, dataset.tokenizer, context=self._context, batch=self._batch, seed=seed
        )
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
        """Return the mean loss over the `validation_windows` of the validation text; None without."""
        return self._validated(model, batches, on_batch).get("loss")

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the accuracy of the predictions on the validation text."""
        found = self._validated(model, FINAL_BATCHES, on_batch)
        return {"masked_accuracy": found["accuracy"]} if found else {}

    def _validated(self, model: nn.Module, batches: int, on_batch: OnBatch) -> Mapping[str, float]:
        text = MaskedText(self._dataset.text.validation.long(), self._dataset.tokenizer)
        return masked_metrics(model, text.batches(batches, self._context, self._batch), on_batch)


def masked_logits(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the logits [batch, chosen, vocabulary] at the chosen positions of a batch of `Masking`."""
    tokens, places, _ = batch
    rows = model.encoder(tokens)
    logits: Tensor = model.logits(rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1])))
    return logits


def masked_metrics(
    model: nn.Module, batches: Iterable[tuple[Tensor, ...]], on_batch: OnBatch = lambda: None
) -> dict[str, float]:
    """Return the mean "loss" of batches of `Masking`, in nats per prediction, and the "accuracy"; nothing without any.

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
            count += int((drawn[2] != IGNORED).sum())
            on_batch()
    model.train(training)
    return {"loss": loss / count, "accuracy": right / count} if count else {}
