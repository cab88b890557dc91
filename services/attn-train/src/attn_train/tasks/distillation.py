"""Distillation: a model also learns the probabilities of a teacher (Hinton et al. 2015, arXiv 1503.02531)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import Incompatible, UserError
from attn_models.loading import load_model
from attn_models.loading.models import config_of
from attn_models.losses import mean_cross_entropy
from attn_models.tokenizers import Tokenizer
from attn_schema.finetuning import REFERENCE_FREE
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn import functional

from attn_train.base_model import base_folder, require_same_vocabulary
from attn_train.tasks.base import (
    PADDED,
    Dataset,
    OnBatch,
    TrainingTask,
    left_out,
    on_host,
    position_of,
    restore_position,
    validation_losses,
)
from attn_train.tasks.grpo import PromptDataset
from attn_train.tasks.instruction_tuning import ChatDataset
from attn_train.tasks.on_policy import logits_at
from attn_train.tasks.on_policy_distillation import OnPolicyDistillationTask
from attn_train.tasks.packed import packed_logits
from attn_train.tasks.preferences import PreferenceDataset

FIELD = "config.objective.teacher"
TEMPERATURE, WEIGHT = 1.0, 0.5
"""Defaults of `distillation_temperature` and `distillation_weight`."""


def distillation_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T² KL(teacher || model) for logits [tokens, vocabulary] divided by T, the mean over tokens, in nats; 0
    without tokens."""
    ours = functional.log_softmax(logits.float() / temperature, dim=-1)
    theirs = functional.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * functional.kl_div(ours, theirs, reduction="sum", log_target=True) / max(len(ours), 1)


def check_teacher(config: TrainingConfig, home: Path, tokenizer: Path) -> None:
    """Raise `UserError` if the teacher does not exist, or its vocabulary is not that of the tokenizer's folder."""
    folder = _teacher_folder(config, home)
    if not (folder / "tokenizer.json").is_file():
        raise Incompatible(f"the teacher {folder.name} has no tokenizer.json", field=FIELD)
    length, longest = config.model.sequence_length, config_of(folder).max_seq_len
    if longest < length:
        problem = f"the teacher {folder.name} reads {longest} tokens, but sequences have {length}: set max_seq_len"
        raise Incompatible(f"{problem} to at most {longest}", field=FIELD)
    theirs, ours = Tokenizer.from_folder(folder), Tokenizer.from_folder(tokenizer)
    require_same_vocabulary(f"teacher {folder.name}", theirs, "model", ours, field=FIELD)


def _teacher_folder(config: TrainingConfig, home: Path) -> Path:
    try:
        return base_folder(config.objective.teacher or "", home)
    except UserError as error:
        error.metadata["field"] = FIELD
        raise


@dataclass(frozen=True, eq=False)
class DistilledDataset:
    """A dataset with a teacher: the task has the distillation loss, all else is forwarded to the dataset."""

    plain: Dataset
    teacher: Any

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The fields of the dataset."""
        return self.plain.model_fields

    @property
    def summary(self) -> str:
        """The summary of the dataset."""
        return f"{self.plain.summary}, with a teacher"

    def task(self, config: TrainingConfig) -> TrainingTask:
        """Return the dataset's task with the distillation loss, or with that of GKD."""
        if isinstance(self.plain, ChatDataset) and config.on_policy.lmbda is not None:
            return OnPolicyDistillationTask(self.plain, self.teacher, config)
        return DistillationTask(self.plain.task(config), self.teacher, config)

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model as the dataset does."""
        return self.plain.save(folder, model)


def distilled(dataset: Dataset, config: TrainingConfig, home: Path) -> Dataset:
    """Return the dataset with the teacher or the reference that the config needs, loaded onto its device; as it is if
    the config needs none."""
    judged = config.data.format == "preference"
    compared = config.objective.preference_loss not in REFERENCE_FREE if judged else config.on_policy.beta
    if isinstance(dataset, PromptDataset | PreferenceDataset) and config.lora.lora_rank is None and compared:
        base = load_model(base_folder(config.model.base_model or "", home), "float32", device=config.device)
        return replace(dataset, reference=base.model.requires_grad_(requires_grad=False))
    if config.objective.teacher is None:
        return dataset
    loaded = load_model(_teacher_folder(config, home), device=config.device, quantization="auto")
    teacher = loaded.model.requires_grad_(requires_grad=False)
    return DistilledDataset(dataset, teacher)


class DistillationTask:
    """The batches of another task, inputs and targets [batch, tokens], with the distillation loss."""

    cross_entropy = False

    def __init__(self, task: TrainingTask, teacher: Any, config: TrainingConfig) -> None:
        self.generator, self.reinforce, self.tokens = task.generator, task.reinforce, task.tokens
        self._task = task
        self.on_host = on_host(task)
        self._teacher = teacher
        self._temperature = config.objective.distillation_temperature or TEMPERATURE
        self._weight = config.objective.distillation_weight or WEIGHT
        self._smoothing = config.optimizer.label_smoothing
        self._apart = config.data.document_mask

    def position(self) -> dict[str, Tensor]:
        """Return the position of the task."""
        return position_of(self._task)

    def restore_position(self, position: Mapping[str, Tensor]) -> None:
        """Restore the position of the task."""
        restore_position(self._task, position)

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return the next batch of the task."""
        batch = self._task.next_batch()
        self.tokens = self._task.tokens
        return batch

    def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """Return (1 - weight) · cross-entropy + weight · `distillation_loss`, at the targets."""
        inputs, *documents, targets = batch
        apart = documents[0] if documents and self._apart else None
        kept = targets != PADDED

        def at_targets(either: Any) -> Tensor:
            return logits_at(either, inputs, kept) if apart is None else packed_logits(either, inputs, apart)[kept]

        logits = at_targets(model)
        with torch.no_grad():
            teacher = at_targets(self._teacher)[:, : logits.shape[-1]]
        text = mean_cross_entropy(logits, targets[kept], PADDED, self._smoothing)
        taught = distillation_loss(logits[:, : teacher.shape[-1]], teacher, self._temperature)
        return (1 - self._weight) * text + self._weight * taught

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the validation loss of the task, without the teacher."""
        return self._task.validation_loss(model, batches, on_batch)

    def validation_losses(self, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:
        """Return the validation losses of the task, by name, without the teacher."""
        return validation_losses(self._task, model, batches, on_batch)

    @property
    def validation_left_out(self) -> int:
        """See `left_out`."""
        return left_out(self._task)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the final metrics of the task."""
        return self._task.final_metrics(model, on_batch)
