"""Distillation on the student's own answers: GKD (Agarwal et al. 2023, arXiv 2306.13649)."""

from __future__ import annotations

from typing import Any

import torch
from attn_schema.on_policy import BETA
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.data.rendering import TokenizedChat
from attn_train.tasks import on_policy
from attn_train.tasks.base import (
    PADDED,
    OnBatch,
    fitting,
    in_parts,
    longest_input,
    mean_over_batches,
    validation_sample,
)
from attn_train.tasks.instruction_tuning import ChatDataset, collate
from attn_train.tasks.on_policy import OnPolicyTask, logits_at, require_room
from attn_train.tasks.policy_losses import generalized_jsd


def prompt_of(chat: TokenizedChat) -> tuple[int, ...]:
    """Return the token ids before the last answer of a conversation."""
    learned = [place for place, target in enumerate(chat.targets) if target != PADDED]
    first = next(place for place in reversed(learned) if place - 1 not in learned)
    return chat.inputs[: first + 1]


class OnPolicyDistillationTask(OnPolicyTask):
    """Batches of conversations, inputs and targets [batch, longest]: a share `lmbda` of the batches has answers that
    the model samples behind the prompts, the others have those of the dataset.

    Conversations that leave no room for an answer are not trained on. Raises `InvalidValue` if none is left.
    """

    def __init__(self, chats: ChatDataset, teacher: Any, config: TrainingConfig) -> None:
        require_room(config)
        room = config.model.sequence_length - config.on_policy.max_completion_length
        limit = "before an answer: max_seq_len - max_completion_length"
        self._training, _ = fitting(chats.training, lambda chat: len(prompt_of(chat)), room, "conversations", limit)
        lengths = [len(chat.inputs) for chat in self._training]
        super().__init__(config, lengths, chats.tokenizer, config.optimizer.batch_size)
        self._validation, self._teacher = chats.validation, teacher
        self._share = config.on_policy.lmbda or 0.0
        self._softness = config.objective.distillation_temperature or 1.0
        self._beta = BETA if config.on_policy.beta is None else config.on_policy.beta

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the `generalized_jsd` of student and teacher at the targets."""
        inputs, targets = batch
        kept = targets != PADDED
        student = logits_at(model, inputs, kept)
        with torch.no_grad():
            teacher = logits_at(self._teacher, inputs, kept)
        shared = min(student.shape[-1], teacher.shape[-1])
        return generalized_jsd(student[:, :shared] / self._softness, teacher[:, :shared] / self._softness, self._beta)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean divergence on the dataset's answers of at most `batches` validation batches."""
        chosen = validation_sample(self._validation, batches)
        kept = [chat for chat in chosen if len(chat.inputs) <= longest_input(model)]
        self.validation_left_out = len(chosen) - len(kept)
        drawn = in_parts(kept, collate, self._batch)
        return mean_over_batches(model, drawn, lambda batch: self.loss(model, batch), on_batch)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> dict[str, float]:  # noqa: ARG002 -- the loss says all
        """Return no metrics, as the loss is sufficient."""
        return {}

    def _new_batch(self, model: Any, on_batch: OnBatch) -> tuple[Tensor, ...]:
        drawn = [self._training[place] for place in self._epochs.next_batch()]
        own = torch.rand((), generator=self.generator).item() < self._share
        self._measure(on_policy_share=float(own))
        if not own:
            return collate(drawn)
        prompts = [prompt_of(chat) for chat in drawn]
        found = self._sampled(model, prompts, 1, on_batch)
        return on_policy.rows_of(prompts, [one.ids for one in found])
