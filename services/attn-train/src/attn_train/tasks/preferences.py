"""Preference tuning with direct preference optimisation (DPO), with the frozen base model as reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_models.lora import AdaptedModel
from attn_models.tokenizers import Tokenizer
from attn_schema.finetuning import DPO_BETA
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional

from attn_train.data.conversations import PreferencePair, read_preferences
from attn_train.data.shapes import Notes
from attn_train.tasks.base import (
    PADDED,
    ExampleTask,
    OnBatch,
    TokenDataset,
    count_targets,
    in_parts,
    longest_input,
    mean_over_batches,
    split_validation,
    validation_sample,
)
from attn_train.tasks.instruction_tuning import collate


@dataclass(frozen=True, eq=False)
class PreferenceDataset(TokenDataset):
    """Training and validation pairs; `left_out` is the number of those longer than a training sequence, and
    `notes` what else was left out."""

    training: Sequence[PreferencePair]
    validation: Sequence[PreferencePair]
    tokenizer: Tokenizer
    left_out: int = 0
    notes: str = ""

    @property
    def summary(self) -> str:
        """The number of pairs."""
        longer = f", {self.left_out} left out as too long" if self.left_out else ""
        return (
            f"{len(self.training)} training and {len(self.validation)} validation pairs of answers{longer}{self.notes}"
        )

    def task(self, config: TrainingConfig) -> PreferenceTask:
        """Return the training task."""
        return PreferenceTask(self, config)


def preference_dataset(path: Path, tokenizer: Tokenizer, *, validation: float, max_length: int) -> PreferenceDataset:
    """Load the pairs of a file or folder; those with a conversation longer than `max_length` tokens are not trained on.

    The fraction `validation` at the end is for validation. Raises as `read_preferences` does, and `InvalidValue` if no
    training pair is left.
    """
    notes = Notes()
    pairs = read_preferences(path, tokenizer, notes)
    first, kept = split_validation(pairs, validation)
    training = [pair for pair in first if length_of(pair) <= max_length]
    if not training:
        allowed = f"at least one pair of at most {max_length + 1} tokens (max_seq_len)"
        raise InvalidValue.of("config.data.dataset", f"{len(pairs)} pairs", allowed)
    return PreferenceDataset(training, kept, tokenizer, len(first) - len(training), str(notes))


def length_of(pair: PreferencePair) -> int:
    """Return the number of input tokens of the longer conversation."""
    return max(len(pair.chosen.inputs), len(pair.rejected.inputs))


def answer_logprobs(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the log probabilities of the answers, float32 [batch] in nats; inputs and targets are [batch, tokens]."""
    kept = targets != PADDED
    logits = model.logits(model.hidden(inputs)[kept]) if hasattr(model, "hidden") else model(inputs)[kept]
    chosen = -functional.cross_entropy(logits.float(), targets[kept], reduction="none")
    rows = kept.nonzero()[:, 0]
    return chosen.new_zeros(len(inputs)).index_add(0, rows, chosen)


def dpo_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the mean of -log sigmoid(margin) over pairs, and the margins [pairs].

    A margin is beta (log-ratio of the chosen - log-ratio of the rejected answer). `policy` and `reference` are the log
    probabilities [2, pairs] of chosen and rejected answers (Rafailov et al. 2023, arXiv 2305.18290, equation 7).
    """
    ratios = policy - reference
    margins = beta * (ratios[0] - ratios[1])
    return -functional.logsigmoid(margins).mean(), margins


class PreferenceTask(ExampleTask):
    """Batches of pairs: inputs and targets [2 · batch, longest], the chosen conversations before the rejected ones.

    The reference model is the model without its adapter.
    """

    def __init__(self, pairs: PreferenceDataset, config: TrainingConfig) -> None:
        super().__init__(config, [length_of(pair) for pair in pairs.training])
        self._pairs = pairs
        self._beta = config.objective.dpo_beta or DPO_BETA

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return a batch of pairs of similar length."""
        batch = collate_pairs([self._pairs.training[place] for place in self._epochs.next_batch()])
        self.tokens += count_targets(batch)
        return batch

    def weight(self, batch: tuple[Tensor, ...]) -> int:
        """Return the number of pairs of a batch."""
        return len(batch[0]) // 2

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean DPO loss over pairs, in nats."""
        return self._compared(model, batch)[0]

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean DPO loss over at most `batches` validation batches."""
        return self._mean(model, lambda batch: self._compared(model, batch)[0], batches, on_batch)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the reward accuracy: the share of validation pairs with a positive margin."""
        kept = self._pairs.validation
        found = self._mean(model, lambda batch: self._accuracy(model, batch), len(kept), on_batch)
        return {} if found is None else {"reward_accuracy": found}

    def _compared(self, model: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        adapted: AdaptedModel = model.adapted
        with torch.no_grad(), adapted.without():
            reference = answer_logprobs(model, *batch).view(2, -1)
        return dpo_loss(answer_logprobs(model, *batch).view(2, -1), reference, self._beta)

    def _accuracy(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        _, margins = self._compared(model, batch)
        return (margins > 0).float().mean()

    def _mean(
        self, model: nn.Module, value: Callable[[tuple[Tensor, ...]], Tensor], batches: int, on_batch: OnBatch
    ) -> float | None:
        chosen = validation_sample(self._pairs.validation, batches)
        kept = [pair for pair in chosen if length_of(pair) <= longest_input(model)]
        self.validation_left_out = len(chosen) - len(kept)
        drawn = in_parts(kept, collate_pairs, self._batch)
        return mean_over_batches(model, drawn, value, on_batch, self.weight)


def collate_pairs(pairs: Sequence[PreferencePair]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [2 · pairs, longest], padded at the end."""
    return collate([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])
