"""Instruction tuning on conversations, with the loss on the assistant's answers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from attn_core.errors import InvalidValue
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
    training_loss,
)


@dataclass(frozen=True, eq=False)
class ChatDataset(TokenDataset):
    """Training and validation conversations; `left_out` is the number of those longer than a training sequence,
    and `notes` what else was left out."""

    training: Sequence[TokenizedChat]
    validation: Sequence[TokenizedChat]
    tokenizer: Tokenizer
    left_out: int = 0
    notes: str = ""

    @property
    def summary(self) -> str:
        """The number of conversations and of answer tokens."""
        answered = sum(chat.answered for chat in self.training)
        counts = f"{len(self.training)} training and {len(self.validation)} validation conversations"
        longer = f", {self.left_out} left out as too long" if self.left_out else ""
        return f"{counts}, {answered} target tokens in answers{longer}{self.notes}"

    def task(self, config: TrainingConfig) -> InstructionTask:
        """Return the training task."""
        return InstructionTask(self, config)


def chat_dataset(data: DataConfig, tokenizer: Tokenizer, *, max_length: int) -> ChatDataset:
    """Load the conversations of a file or folder; those longer than `max_length` tokens are not trained on.

    Raises as `read_chats` does, and `InvalidValue` if no training conversation is left.
    """
    # The same conversations are for validation whatever the length of a training sequence.
    first, kept, notes = read_splits(data, lambda rows, reading: read_chats(rows, tokenizer, reading))
    training = [chat for chat in first if len(chat.inputs) <= max_length]
    if not training:
        allowed = f"at least one conversation of at most {max_length + 1} tokens (max_seq_len)"
        raise InvalidValue.of("config.data.dataset", f"{len(first)} conversations{notes}", allowed)
    return ChatDataset(training, kept, tokenizer, len(first) - len(training), notes)


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
