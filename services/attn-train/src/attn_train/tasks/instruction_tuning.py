"""Instruction tuning: conversations of which the answers alone are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from attn_core.errors import InvalidValue
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.data.conversations import TokenizedChat, read_chats
from attn_train.tasks.base import (
    PADDED,
    OnBatch,
    SeededTask,
    TokenDataset,
    auxiliary_losses,
    count_targets,
    mean_validation_loss,
    similar_in_length,
    split_validation,
)


@dataclass(frozen=True, eq=False)
class ChatDataset(TokenDataset):
    """Conversations to train on and those kept for validation; `left_out` were longer than a training sequence."""

    training: Sequence[TokenizedChat]
    validation: Sequence[TokenizedChat]
    tokenizer: Tokenizer
    left_out: int = 0

    @property
    def summary(self) -> str:
        """How many, and how many tokens of answers."""
        answered = sum(chat.answered for chat in self.training)
        said = f"{len(self.training)} training and {len(self.validation)} validation conversations"
        longer = f", {self.left_out} longer ones left out" if self.left_out else ""
        return f"{said}, {answered} tokens of answers to learn{longer}"

    def task(self, config: TrainingConfig) -> InstructionTask:
        """Batches of them."""
        return InstructionTask(self, config)


def chat_dataset(path: Path, tokenizer: Tokenizer, *, validation: float, longest: int) -> ChatDataset:
    """The conversations of a .jsonl file of at most `longest` tokens; the fraction `validation` at the end is kept.

    Raises as `read_chats`, and `InvalidValue` where none is left.
    """
    chats = read_chats(path, tokenizer)
    fitting = [chat for chat in chats if len(chat.inputs) <= longest]
    training, kept = split_validation(fitting, validation)
    if not training:
        allowed = f"at least one conversation of at most {longest + 1} tokens (max_seq_len)"
        raise InvalidValue.of("config.data.dataset", f"{len(chats)} conversations", allowed)
    return ChatDataset(training=training, validation=kept, tokenizer=tokenizer, left_out=len(chats) - len(fitting))


class InstructionTask(SeededTask):
    """Batches of conversations about equally long, [batch, longest] inputs and targets, padded at the end.

    What a causal model computes before the padding has no part of it.
    """

    def __init__(self, chats: ChatDataset, config: TrainingConfig) -> None:
        super().__init__(config)
        self._chats = chats
        self._sorted = sorted(chats.training, key=lambda chat: len(chat.inputs))

    def next_batch(self) -> tuple[Tensor, ...]:
        """Conversations near in length to one that is drawn from all."""
        batch = collate(similar_in_length(self._sorted, self._batch, self.generator))
        self.tokens += count_targets(batch)
        return batch

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy of the tokens of answers, and auxiliary losses."""
        return next_token_loss(model, batch[0], batch[1], self._smoothing) + auxiliary_losses(model)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """The mean over at most `batches` batches kept for validation."""
        return mean_validation_loss(
            model,
            self._chats.validation,
            collate,
            lambda batch: next_token_loss(model, batch[0], batch[1], 0.0),
            batch=self._batch,
            batches=batches,
            on_batch=on_batch,
        )

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:  # noqa: ARG002 -- the loss says all
        """Nothing more."""
        return {}


def collate(chats: Sequence[TokenizedChat]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, longest], padded at the end."""
    inputs = pad_sequence([torch.tensor(chat.inputs) for chat in chats], batch_first=True)
    targets = [torch.tensor(chat.targets) for chat in chats]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDED)
