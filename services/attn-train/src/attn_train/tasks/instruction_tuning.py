"""Instruction tuning on conversations, with the loss on the assistant's answers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_schema.training import DataConfig, TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.data.conversations import read_chats, read_splits
from attn_train.data.rendering import TokenizedChat
from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    TokenDataset,
    fitting,
    training_loss,
)


@dataclass(frozen=True, eq=False)
class ChatDataset(TokenDataset):
    """Training and validation conversations; `notes` says what was left out."""

    training: Sequence[TokenizedChat]
    validation: Sequence[TokenizedChat]
    tokenizer: Tokenizer
    notes: str = ""

    @property
    def summary(self) -> str:
        """The number of conversations and of answer tokens."""
        answered = sum(chat.answered for chat in self.training)
        counts = f"{len(self.training)} training and {len(self.validation)} validation conversations"
        return f"{counts}, {answered} target tokens in answers{self.notes}"

    def task(self, config: TrainingConfig) -> InstructionTask:
        """Return the training task."""
        return InstructionTask(self, config)


def chat_dataset(data: DataConfig, tokenizer: Tokenizer, *, max_length: int) -> ChatDataset:
    """Load the conversations of a file or folder; those longer than `max_length` tokens are not trained on.

    Raises as `read_chats` does, and `InvalidValue` if no training conversation is left.
    """
    # The same conversations are for validation whatever the length of a training sequence.
    first, kept, notes = read_splits(data, lambda rows, reading: read_chats(rows, tokenizer, reading))
    training, longer = fitting(first, lambda chat: len(chat.inputs), max_length, f"conversations{notes}")
    return ChatDataset(training, kept, tokenizer, longer + notes)


class InstructionTask(CollatedTask):
    """Batches of conversations of similar length: inputs and targets [batch, longest], padded at the end.

    A causal model needs no padding mask, as no token attends to the padding after it.
    """

    def __init__(self, chats: ChatDataset, config: TrainingConfig) -> None:
        super().__init__(config, chats, lambda chat: len(chat.inputs), collate)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy of the answer tokens."""
        return training_loss(model, batch[0], batch[1], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches; conversations that the model cannot read are
        left out, and counted."""
        return self.mean(model, lambda batch: next_token_loss(model, batch[0], batch[1]), batches, on_batch)

    def fits(self, example: TokenizedChat, longest: int) -> bool:
        """See `CollatedTask.fits`."""
        return len(example.inputs) <= longest

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:  # noqa: ARG002 -- the loss says all
        """Return no metrics, as the loss is sufficient."""
        return {}


def collate(chats: Sequence[TokenizedChat]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [batch, longest], padded at the end."""
    inputs = pad_sequence([torch.tensor(chat.inputs) for chat in chats], batch_first=True)
    targets = [torch.tensor(chat.targets) for chat in chats]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDED)
