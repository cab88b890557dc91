"""Preference tuning: DPO and its kin and KTO, with the frozen base model as reference, SimPO and ORPO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.images import TileReader
from attn_models.vision_language.prompts import TileTexts
from attn_schema.finetuning import REFERENCE_FREE
from attn_schema.training import DataConfig, TrainingConfig
from torch import Tensor, nn

from attn_train.data.conversations import PreferencePair, read_preferences, read_splits
from attn_train.data.pictures import ALONE
from attn_train.data.rendering import TokenizedChat
from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    TokenDataset,
    fitting,
)
from attn_train.tasks.instruction_tuning import collate, image_files, reader_of, seeing
from attn_train.tasks.on_policy import token_logprobs
from attn_train.tasks.policy_losses import summed
from attn_train.tasks.preference_losses import AVERAGED, PAIR_LOSSES, kto


@dataclass(frozen=True, eq=False)
class PreferenceDataset(TokenDataset):
    """Training and validation pairs; `notes` says what was left out, and `reader` reads images, if there are any.

    `reference` is the model that losses compare with, if it is not the model without its adapter.
    """

    training: Sequence[Example]
    validation: Sequence[Example]
    tokenizer: Tokenizer
    notes: str = ""
    reader: TileReader | None = None
    reference: Any = None

    @property
    def files(self) -> list[Path]:
        """The images' files; prepared preferences have none, and are not read for it."""
        return [] if self.reader is None else image_files(chats_in((*self.training, *self.validation)))

    @property
    def summary(self) -> str:
        """The number of pairs, or of answers of each kind, if they are in memory."""
        read = self.training if isinstance(self.training, list) else []
        kinds = [one.desirable for one in read if isinstance(one, JudgedChat)]
        judged = f", {sum(kinds)} desirable and {len(kinds) - sum(kinds)} undesirable answers" if kinds else ""
        return f"{len(self.training)} training and {len(self.validation)} validation preferences{judged}{self.notes}"

    def task(self, config: TrainingConfig) -> PreferenceTask:
        """Return the training task."""
        kind = KtoTask if config.objective.preference_loss == "kto" else PreferenceTask
        return kind(self, config)


@dataclass(frozen=True, eq=False)
class JudgedChat:
    """A conversation whose answer is desirable or not."""

    chat: TokenizedChat
    desirable: bool

    @property
    def chats(self) -> list[TokenizedChat]:
        """The conversation."""
        return [self.chat]


Example = PreferencePair | JudgedChat


def chats_in(examples: Iterable[Example]) -> Iterator[TokenizedChat]:
    """Yield the conversations of examples."""
    return chain.from_iterable(example.chats for example in examples)


def judged(pairs: Iterable[PreferencePair]) -> Iterator[JudgedChat]:
    """Yield the conversations of pairs, each by itself."""
    for pair in pairs:
        yield from (JudgedChat(chat, desirable=chat is pair.chosen) for chat in pair.chats)


def complete_pairs(pairs: Iterable[PreferencePair]) -> Iterator[PreferencePair]:
    """Yield pairs; raises `InvalidValue` for a labelled answer alone."""
    for pair in pairs:
        if len(pair.chats) < 2:
            allowed = "chosen and rejected, or --preference-loss kto"
            raise InvalidValue.of("config.data.dataset", "an answer with a label", allowed)
        yield pair


def preference_dataset(
    data: DataConfig, tokenizer: Tokenizer, *, loss: str, max_length: int, tiles: TileTexts | str = ALONE
) -> PreferenceDataset:
    """Load the pairs of a file or folder, or the judged answers for the loss kto; those with a conversation longer than
    `max_length` tokens are not trained on. `tiles` is what encodes images, or why they are refused.

    Raises as `read_preferences` does, and `InvalidValue` if no training example is left.
    """
    make: Callable[[Iterable[PreferencePair]], Iterable[Example]] = judged if loss == "kto" else complete_pairs
    first, kept, notes = read_splits(
        data, lambda rows, reading: make(read_preferences(rows, tokenizer, reading)), tiles
    )
    training, longer = fitting(first, length_of, max_length, f"preferences{notes}")
    reader = reader_of(chats_in((*training, *kept)), tiles)
    return PreferenceDataset(training, kept, tokenizer, longer + notes, reader)


def length_of(example: Example) -> int:
    """Return the number of input tokens of the longer conversation."""
    return max(len(chat.inputs) for chat in example.chats)


def answer_logprobs(model: Any, inputs: Tensor, targets: Tensor, *, averaged: bool = False) -> Tensor:
    """Return the log probabilities of the answers, or their means per token, at least float32 [rows] in nats; inputs
    and targets are [rows, tokens]."""
    kept = targets != PADDED
    sums = summed(token_logprobs(model, inputs, targets), kept.nonzero()[:, 0], len(inputs))
    return sums / kept.sum(1).clamp(min=1) if averaged else sums


class PreferenceTask(CollatedTask):
    """Batches of pairs: inputs and targets [2 · batch, longest], the chosen conversations before the rejected ones, and
    images between them as `InstructionTask` has them.

    The reference model is the base: the model without its adapter, or a second one.
    """

    cross_entropy = False

    def __init__(self, pairs: PreferenceDataset, config: TrainingConfig) -> None:
        super().__init__(config, pairs, length_of, self.collated)
        self._objective = config.objective

    def weight(self, batch: tuple[Tensor, ...]) -> int:
        """Return the number of pairs of a batch."""
        return len(batch[0]) // 2

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss over pairs, in nats."""
        return self._compared(model, batch)[0]

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches."""
        return self.mean(model, lambda batch: self._compared(model, batch)[0], batches, on_batch)

    def fits(self, example: Example, longest: int) -> bool:
        """See `CollatedTask.fits`."""
        return length_of(example) <= longest

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the reward accuracy: the share of validation examples whose rewards are as preferred."""
        every = len(self._data.validation)
        found = self.mean(model, lambda batch: self._compared(model, batch)[1], every, on_batch)
        return {} if found is None else {"reward_accuracy": found}

    def _compared(self, model: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a batch, and the share of pairs with a positive margin."""
        name = self._objective.preference_loss
        chosen, rejected = self._rewards(model, batch, averaged=name in AVERAGED).view(2, -1)
        loss = PAIR_LOSSES[name](chosen, rejected, self._objective)
        return loss.mean(), (chosen > rejected).float().mean()

    def _rewards(self, model: Any, batch: tuple[Tensor, ...], *, averaged: bool = False) -> Tensor:
        """Return the log-ratios of policy and reference [rows], or log probabilities where a loss has no reference."""

        def logprobs(of: Any) -> Tensor:
            with seeing(of, batch):
                return answer_logprobs(of, batch[0], batch[-1], averaged=averaged)

        if self._objective.preference_loss in REFERENCE_FREE:
            return logprobs(model)
        own = self._data.reference
        with torch.no_grad(), nullcontext() if own is not None else model.adapted.without():
            reference = logprobs(model if own is None else own)
        return logprobs(model) - reference

    def collated(self, examples: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return inputs and targets [2 · pairs, longest], padded at the end, and images."""
        chats = [*(pair.chosen for pair in examples), *(pair.rejected for pair in examples)]
        return collate(chats, self._data.reader)


class KtoTask(PreferenceTask):
    """Batches of judged answers: inputs, labels and targets [2 · batch, ...], the answers to their own prompts before
    those to the prompts of their neighbours in the batch."""

    def _compared(self, model: Any, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a batch, and the share of examples with a reward of the right sign."""
        ratios, mismatched = self._rewards(model, batch).view(2, -1)
        desirable = batch[1][: len(ratios)]
        loss = kto(ratios, mismatched, desirable, self._objective)
        return loss.mean(), ((ratios > 0) == desirable).float().mean()

    def collated(self, examples: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return inputs, labels and targets [2 · examples, ...], padded at the end."""
        others = [*examples[1:], *examples[:1]]
        mismatched = [answered(one.chat, other.chat) for one, other in zip(examples, others, strict=True)]
        inputs, *seen = collate([*(one.chat for one in examples), *mismatched], self._data.reader)
        return inputs, torch.tensor([one.desirable for one in examples] * 2), *seen


def answered(prompt: TokenizedChat, answer: TokenizedChat) -> TokenizedChat:
    """Return the first conversation with the learned answer of the other one."""
    first, start = (next(n for n, t in enumerate(chat.targets) if t != PADDED) for chat in (prompt, answer))
    inputs = (*prompt.inputs[: first + 1], *answer.inputs[start + 1 :])
    return TokenizedChat(inputs, (*prompt.targets[:first], *answer.targets[start:]), prompt.images)
