"""Learning to write a target from its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from attn_train.loop.lessons import Done
from attn_train.loop.padded import PADDED, validation_mean
from attn_train.loop.pairs import PairTokens, TokenPair
from attn_train.loop.seeds import derived
from attn_train.loop.translation import bleu, translate
from attn_train.spec import TrainingSpec

NEAR = 8
"""A batch is drawn from as many batches of pairs that are about as long."""


class PairLessons:
    """Batches of pairs; the decoder is shown what it should have written so far, and predicts what follows.

    A batch is padded [batch, source] tokens and which of them are real, and [batch, target] inputs and targets.
    """

    def __init__(self, pairs: PairTokens, spec: TrainingSpec) -> None:
        self._pairs = pairs
        self._batch = spec.optimizer.batch
        self._smoothing = spec.optimizer.label_smoothing
        self._bleu = spec.checkpoint.bleu_sentences
        self._sorted = sorted(pairs.training, key=lambda pair: (len(pair[1]), len(pair[0])))
        self.generator = torch.Generator().manual_seed(derived(spec.seed, "batches"))
        self.tokens = 0

    def draw(self) -> tuple[Tensor, ...]:
        """A batch of pairs about as long as one that is drawn from all."""
        count = len(self._sorted)
        window = min(count, NEAR * self._batch)
        centre = int(torch.randint(count, (), generator=self.generator))
        first = min(max(0, centre - window // 2), count - window)
        chosen = first + torch.randperm(window, generator=self.generator)[: self._batch]
        batch = collated([self._sorted[place] for place in chosen.tolist()])
        self.tokens += int((batch[3] != PADDED).sum())
        return batch

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy with targets smoothed (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
        return _loss(model, batch, self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, done: Done) -> float | None:
        """The mean over at most `batches` batches kept for validation, not smoothed."""
        return validation_mean(
            model,
            list(self._pairs.validation),
            collated,
            lambda batch: _loss(model, batch, 0.0),
            batch=self._batch,
            batches=batches,
            done=done,
        )

    def final_values(self, model: nn.Module, done: Done) -> Mapping[str, Any]:
        """BLEU over the first validation sources, where asked for."""
        texts = self._pairs.texts[: self._bleu]
        if not texts:
            return {}
        written = translate(model, self._pairs.tokenizer, [source for source, _ in texts], done)
        return {"bleu": bleu(written, [target for _, target in texts])}


def collated(pairs: Sequence[TokenPair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sources, which of their tokens are real, inputs and targets [batch, ...], padded at the end."""
    sources = [torch.tensor(source) for source, _ in pairs]
    targets = [torch.tensor(target) for _, target in pairs]
    source = pad_sequence(sources, batch_first=True)
    key_padding_mask = torch.arange(source.shape[1]) < torch.tensor([len(rows) for rows in sources])[:, None]
    inputs = pad_sequence([rows[:-1] for rows in targets], batch_first=True)
    return (
        source,
        key_padding_mask,
        inputs,
        pad_sequence([rows[1:] for rows in targets], batch_first=True, padding_value=PADDED),
    )


def _loss(model: nn.Module, batch: tuple[Tensor, ...], smoothing: float) -> Tensor:
    source, key_padding_mask, inputs, targets = batch
    logits = model(inputs, source, key_padding_mask)
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PADDED, label_smoothing=smoothing
    )
