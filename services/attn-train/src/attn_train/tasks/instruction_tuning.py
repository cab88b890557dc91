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
from attn_train.tasks.base import PADDED, OnBatch, TokenDataset, auxiliary_losses, derived, mean_validation_loss
from attn_train.tasks.reinforce import Reinforce

POOL_BATCHES = 8
"""Batches of conversations about equally long are made of as many batches."""


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
    held = len(fitting) - int(len(fitting) * validation)
    if not fitting[:held]:
        allowed = f"at least one conversation of at most {longest + 1} tokens (max_seq_len)"
        raise InvalidValue.of("config.data.dataset", f"{len(chats)} conversations", allowed)
    return ChatDataset(
        training=fitting[:held], validation=fitting[held:], tokenizer=tokenizer, left_out=len(chats) - len(fitting)
    )


class InstructionTask:
    """Batches of conversations about equally long, [batch, longest] inputs and targets, padded at the end.

    What a causal model computes before the padding has no part of it.
    """

    def __init__(self, chats: ChatDataset, config: TrainingConfig) -> None:
        self._chats = chats
        self._batch = config.optimizer.batch_size
        self._smoothing = config.optimizer.label_smoothing
        self.generator = torch.Generator().manual_seed(derived(config.seed, "batches"))
        self.tokens = 0
        self.reinforce = Reinforce()

    def next_batch(self) -> tuple[Tensor, ...]:
        """Conversations near in length to one that is drawn from all."""
        chosen = similar_places([len(chat.inputs) for chat in self._chats.training], self._batch, self.generator)
        batch = collate([self._chats.training[place] for place in chosen])
        self.tokens += int((batch[1] != PADDED).sum())
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


def similar_places(lengths: Sequence[int], batch: int, generator: torch.Generator) -> list[int]:
    """Places of `batch` texts about as long as one that is drawn from all; fewer where there are fewer."""
    count = len(lengths)
    order = sorted(range(count), key=lambda place: lengths[place])
    window = min(count, POOL_BATCHES * batch)
    centre = int(torch.randint(count, (), generator=generator))
    first = min(max(0, centre - window // 2), count - window)
    return [order[first + place] for place in torch.randperm(window, generator=generator)[:batch].tolist()]


def collate(chats: Sequence[TokenizedChat]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, longest], padded at the end."""
    inputs = pad_sequence([torch.tensor(chat.inputs) for chat in chats], batch_first=True)
    targets = [torch.tensor(chat.targets) for chat in chats]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDED)
