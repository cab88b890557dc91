"""Prompt completion: the model learns to generate the second part of a text from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from attn_core.errors import InvalidValue
from attn_core.reinforce import samples_keys
from attn_engine import Request, SamplingParams, build_engine
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import word_tokenizer
from attn_models.tokenizers.tokenizer import eos_id
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    TokenDataset,
    split_validation,
    training_loss,
)
from attn_train.tasks.seq2seq import TextPair

EQUALS = "="
"""The word between the prompt and the completion."""
FINAL_PROMPTS = 100
"""The number of validation prompts that are completed for the final accuracy."""


@dataclass(frozen=True, eq=False)
class PromptCompletion:
    """The token ids of a prompt (`given`), and of its completion with the end token (`written`)."""

    given: tuple[int, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CompletionDataset(TokenDataset):
    """Prompts with completions for training and validation."""

    training: Sequence[PromptCompletion]
    validation: Sequence[PromptCompletion]
    tokenizer: Tokenizer

    @property
    def summary(self) -> str:
        """The number of texts."""
        return f"{len(self.training)} training and {len(self.validation)} validation texts"

    def task(self, config: TrainingConfig) -> CompletionTask:
        """Return the training task."""
        return CompletionTask(self, config)


def completion_dataset(pairs: Sequence[TextPair], *, validation: float, max_length: int) -> CompletionDataset:
    """Tokenize pairs as texts "source = target", one token per word; those longer than `max_length` are left
    out.

    The fraction `validation` at the end is for validation. Raises `InvalidValue` if no training text is left.
    """
    tokenizer = word_tokenizer([EQUALS, *(text for pair in pairs for text in pair)])
    given = tokenizer.encode_batch([f"{source} {EQUALS}" for source, _ in pairs])
    written = tokenizer.encode_batch([target for _, target in pairs], add_special=False)
    end = eos_id(tokenizer)
    texts = [PromptCompletion(tuple(a), (*b, end)) for a, b in zip(given, written, strict=True)]
    fitting = [text for text in texts if len(text.given) + len(text.written) <= max_length]
    training, kept = split_validation(fitting, validation)
    if not training:
        raise InvalidValue.of("model.max_seq_len", max_length, "a length that fits at least one of the texts")
    return CompletionDataset(training=training, validation=kept, tokenizer=tokenizer)


class CompletionTask(CollatedTask):
    """Batches of texts: inputs and targets [batch, longest]; tokens of the prompt are not targets."""

    def __init__(self, texts: CompletionDataset, config: TrainingConfig) -> None:
        super().__init__(config, texts, lambda text: len(text.given) + len(text.written), collate)
        self._texts = texts

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy of the completions."""
        if samples_keys(model):
            return self.reinforce.loss(model, lambda: model(batch[0]), batch[1], self._smoothing)
        return training_loss(model, batch[0], batch[1], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches."""
        return self.mean(model, lambda batch: next_token_loss(model, batch[0], batch[1]), batches, on_batch)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the share of the first validation prompts that attn-engine completes exactly."""
        texts = self._texts.validation[:FINAL_PROMPTS]
        if not texts:
            return {}
        answers = complete(model, self._texts.tokenizer, [text.given for text in texts], on_batch)
        correct = sum(answer == text.written for answer, text in zip(answers, texts, strict=True))
        return {"answer_accuracy": correct / len(texts)}


def complete(
    model: nn.Module, tokenizer: Tokenizer, given: Sequence[tuple[int, ...]], on_batch: OnBatch
) -> list[tuple[int, ...]]:
    """Complete each prompt by greedy decoding with attn-engine; the model's mode is restored."""
    training = model.training
    model.eval()
    engine = build_engine(model, tokenizer)  # type: ignore[arg-type]
    for place, ids in enumerate(given):
        room = int(model.max_seq_len) - len(ids)  # type: ignore[arg-type]
        task = SamplingParams(temperature=0.0, max_new_tokens=room)
        engine.submit(Request(id=str(place), token_ids=ids, params=task))
    written: list[tuple[int, ...]] = [()] * len(given)
    while not engine.idle:
        for event in engine.step():
            written[int(event.request_id)] += tuple(token.id for token in event.delta.tokens)
        on_batch()
    model.train(training)
    return written


def collate(texts: Sequence[PromptCompletion]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [batch, longest], padded at the end."""
    rows = [torch.tensor([*text.given, *text.written]) for text in texts]
    goals = [row[1:].clone() for row in rows]
    for goal, text in zip(goals, texts, strict=True):
        goal[: len(text.given) - 1] = PADDED
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
    return inputs, pad_sequence(goals, batch_first=True, padding_value=PADDED)
